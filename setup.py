"""Where the packages lie and how the C extension is built; all other metadata is in pyproject.toml.

`profiler/` stands at the top level of the repository and is installed as `attmemo.profiler`, so that no
generic top-level name lands in site-packages.
"""

from setuptools import Extension, find_packages, setup

PACKAGES = find_packages(include=["attmemo", "attmemo.*"])
PROFILER = ["attmemo.profiler", *(f"attmemo.profiler.{name}" for name in find_packages("profiler"))]

setup(
    packages=PACKAGES + PROFILER,
    package_dir={"attmemo.profiler": "profiler"},
    package_data={"attmemo": ["py.typed"], "attmemo.profiler": ["report.html.j2"]},
    ext_modules=[
        Extension(
            "attmemo._native",
            sources=["native/window.c"],
            # -UNDEBUG: distutils passes -DNDEBUG, and a check that is compiled out is not a check.
            extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-UNDEBUG"],
        )
    ],
)
