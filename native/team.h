/*
 * team.h: what the kernels share: the instruction sets they are compiled for, and the threads that do the work.
 * Included once by each extension, after Python.h.
 *
 * THREADS.  Work is shared among the OpenMP team that torch computes with, called through a pointer (use_team): a
 * second pool would fight with the first for the cores, and linking libgomp would load a second copy beside the one in
 * torch's wheel. Without a team the calling thread does all the work.
 *
 * ROADS NOT TAKEN.  Where another program keeps one of two cores busy, all wait at the end of each call for the thread
 * that does not run: a line of MiniLM takes 25 ms with two threads and 3 with one (spins of 30,000; by libgomp's default
 * 5 to 10). A caller that saw how long it waited, and left a thread out for a while, took 3.5 ms then; but the service,
 * where HTTP takes a core now and then, answered 10 to 25 % fewer lines.
 *
 * INSTRUCTION SETS.  The kernels' headers are compiled once for AVX-512, once for it with products of bfloat16, once for
 * AVX2 and once for whatever the compiler takes for granted; the first that the processor has is used. For its matrix
 * unit, if it has one, see amx.h.
 */

#ifndef ATTMEMO_TEAM_H
#define ATTMEMO_TEAM_H

#include <ctype.h>
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "fine.h"

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)

/* Whether the environment names this instruction set among those that are not to be used. */
static inline bool is_left_out(const char *name)
{
    static const char *_Atomic read; /* the environment is asked once a process */
    const char *words = read;
    if (!words) {
        words = getenv("ATTMEMO_WITHOUT");
        read = words = words ? words : "";
    }
    const size_t size = strlen(name);
    for (const char *at = words; (at = strstr(at, name)) != NULL; at += size)
        if ((at == words || !isalnum((unsigned char)at[-1])) && !isalnum((unsigned char)at[size]))
            return true;
    return false;
}

/* Whether the processor has what functions of this suffix are compiled for, and they may be used. */
static inline bool has_instructions(const char *name)
{
    if (is_left_out(name))
        return false;
#if defined(__x86_64__)
    if (strcmp(name, "avx512") == 0)
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (strcmp(name, "avx512bf16") == 0)
        return has_instructions("avx512") && __builtin_cpu_supports("avx512bf16");
    if (strcmp(name, "amx") == 0) { /* its registers are large: Linux wants to be asked for them, once a process */
        static atomic_int granted;  /* 1: yes, -1: no */
        if (!granted)
            granted = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
                              __builtin_cpu_supports("avx512bf16") && has_instructions("avx512") &&
                              syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0
                          ? 1
                          : -1;
        return granted == 1;
    }
    if (strcmp(name, "avx2") == 0)
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
    return strcmp(name, "generic") == 0;
}

typedef void (*Team)(void (*)(void *), void *, unsigned, unsigned);

static Team team; /* GOMP_parallel of the library that torch uses, or NULL */

/* work(job) on so many threads at once, or on this one. */
static void share(void (*work)(void *), void *job, size_t threads)
{
    if (team && threads > 1)
        team(work, job, (unsigned)threads, 0);
    else
        work(job);
}

PyDoc_STRVAR(use_team_doc,
             "use_team($module, path, /)\n--\n\nShare work with the OpenMP library at `path`, if the process has loaded "
             "it and it speaks GNU's interface: returns whether.");

static PyObject *native_use_team(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *path;
    if (!PyArg_ParseTuple(args, "s:use_team", &path))
        return NULL;
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD); /* only if the process has it already */
    void *symbol = library ? dlsym(library, "GOMP_parallel") : NULL;
    Team found = NULL;
    memcpy(&found, &symbol, sizeof found); /* ISO C knows no cast from an object to a function */
    if (found)
        team = found; /* the library is never closed: the pointer stays good */
    return PyBool_FromLong(found != NULL);
}

#endif
