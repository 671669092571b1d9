"""Where the packages lie and how the C extension is built; all other metadata is in pyproject.toml.

`profiler/` stands at the top level of the repository and is installed as `attmemo.profiler` through the link
`attmemo/profiler`, so that no generic top-level name lands in site-packages.
"""

import os
import platform
import sys
from concurrent.futures import ThreadPoolExecutor

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.modified import newer_group

if not sys.platform.startswith("linux") or platform.machine() not in ("x86_64", "aarch64"):
    sys.exit(
        f"attmemo runs on Linux, on x86-64 and arm64; this is {platform.system()} on {platform.machine()}.\n"
        "  Next: use a Linux machine, a container or a virtual machine"
    )

# -UNDEBUG: distutils passes -DNDEBUG, and a check that is compiled out is not a check.
STRICT = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-UNDEBUG"]
# For `make sanitize`: what to look for while the tests run, such as "address,undefined".
CHECKS = [f"-fsanitize={name}" for name in os.environ.get("ATTMEMO_SANITIZE", "").split(",") if name]
if CHECKS:
    CHECKS += ["-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g"]
SHARED = [f"native/{name}.h" for name in ("amx", "arrays", "fine", "module", "numbers", "team", "tiles")]
ATTENTION = ["generic", "avx2", "avx512", "avx512bf16"]
ATTENTION_PARTS = [
    "attention",
    "attention_face",
    "attention_512",
    "attention_amx",
    "attention_dot",
    "attention_tiled",
    "attention_tiles",
    "attention_kernel",
    "attention_rows",
    "attention_columns",
    "attention_sets",
    "attention_sheet",
    "attention_sheet_amx",
    "attention_sheet_distances",
    "attention_sheet_products",
    "attention_x86",
    "types_avx2",
    "types_avx512",
    "vectors",
]
LINEAR = [
    "32_generic",
    "32_avx2",
    "32_avx512",
    "8_generic",
    "8_avx2",
    "8_avxvnni",
    "8_vnni",
    "8_vnni16",
    "8_amx",
    "16_amx",
    "16_avx512",
]
LINEAR_PARTS = [
    "linear",
    "linear_face",
    "linear_kernel",
    "linear_finish",
    "linear_gelu",
    "linear_panels",
    "linear16_kernel",
    "linear32_kernel",
    "linear8_avx512",
    "linear8_kernel",
    "linear8_rows",
    "linear8_vnni",
    "linear8_x86",
    "linear_amx",
    "attention",
    "types_avx2",
    "types_avx512",
    "vectors",
]

ROWS = ["_generic", "_avx2", "_avx512"]
ROWS_PARTS = ["rows", "rows_kernel", "attention", "types_avx2", "types_avx512", "vectors"]
SINGLE_PARTS = ["arrays", "fine", "gaps", "kinds", "module", "numbers", "pairing", "team"]
CHAIN_PARTS = ["attention", "attention_face", "linear", "linear_face"]
DECODE_PARTS = ["decode", "decode_kernel", *CHAIN_PARTS, "types_avx2", "types_avx512", "vectors"]


class Build(build_ext):
    """Sources are compiled beside each other, and each once: two extensions have some in common.

    Those of AVX-512 come first: one takes as long as half of the others.
    """

    def build_extensions(self):
        stale = [ext for ext in self.extensions if self._is_stale(ext)]
        wanted = {source: ext.extra_compile_args for ext in stale for source in ext.sources}
        order = sorted(wanted, key=lambda source: "avx512" not in source)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = dict(zip(order, pool.map(lambda name: self._compile(name, wanted[name]), order), strict=True))
        self.force = True  # what is linked below has no sources left to compare
        for ext in stale:
            ext.extra_objects, ext.sources = [file for source in ext.sources for file in objects[source]], []
            self.build_extension(ext)

    def _is_stale(self, ext):
        return self.force or newer_group([*ext.sources, *ext.depends], self.get_ext_fullpath(ext.name), "newer")

    def _compile(self, source, flags):
        return self.compiler.compile([source], self.build_temp, extra_postargs=flags, debug=self.debug)


def of_sets(name, kernels, parts):
    """A module whose kernels have one source for each instruction set: see native/attention.h."""
    return Extension(
        f"attmemo.kernels._{name}",
        sources=[f"native/{source}.c" for source in (name, *kernels)],
        depends=[f"native/{header}.h" for header in parts] + SHARED,
        extra_compile_args=[*STRICT, "-O3", "-ffp-contract=fast", *CHECKS],
        extra_link_args=CHECKS,
        libraries=["dl", "m"],
    )


PACKAGES = find_packages(include=["attmemo", "attmemo.*"])

setup(
    cmdclass={"build_ext": Build},
    packages=PACKAGES,
    package_data={
        "attmemo": ["py.typed", "*/*.pyi"],
        "attmemo.profiler": ["logs.txt", "report.html.j2"],
        "attmemo.serve": ["page.html", "reference.html"],
    },
    ext_modules=[
        Extension(
            "attmemo.mmap._window",
            sources=["native/window.c"],
            extra_compile_args=[*STRICT, "-O2", *CHECKS],
            extra_link_args=CHECKS,
        ),
        Extension(
            "attmemo.kernels._map_product",
            sources=["native/map_product.c"],
            depends=["native/map_product_kernel.h", "native/map_product_amx.h", *SHARED],
            # Sums of products: fused multiply-add, which -std=c11 forbids. -O3 keeps blocks of sums in registers.
            extra_compile_args=[*STRICT, "-O3", "-ffp-contract=fast", *CHECKS],
            extra_link_args=CHECKS,
            libraries=["dl"],
        ),
        *(of_sets(name, [f"attention_{part}" for part in ATTENTION], ATTENTION_PARTS)
          for name in ("cache_attention", "row_attention")),
        of_sets("linear", [f"linear{part}" for part in LINEAR], LINEAR_PARTS),
        of_sets("rows", [f"rows{part}" for part in ROWS], ROWS_PARTS),
        of_sets("decode", [f"decode{part}" for part in ROWS], DECODE_PARTS),
        Extension(
            "attmemo.kernels._chain",
            sources=["native/chain.c"],
            depends=[*(f"native/{name}.h" for name in CHAIN_PARTS), *SHARED],
            extra_compile_args=[*STRICT, "-O2", *CHECKS],
            extra_link_args=CHECKS,
        ),
        *(
            Extension(
                f"attmemo.kernels._{name}",
                sources=[f"native/{name}.c"],
                depends=[f"native/{part}.h" for part in SINGLE_PARTS],
                extra_compile_args=[*STRICT, "-O3", *CHECKS],
                extra_link_args=CHECKS,
                libraries=["dl", "m"],
            )
            for name in ("ngram", "embed", "members", "plan", "sketch")
        ),
    ],
)
