/*
 * window.c: one contiguous range of addresses over scattered pages of a file.   Module attmemo.mmap._window, type Window.
 *
 * WHAT IT IS.  Slots that lie anywhere in one arena file are made to appear side by side in memory, so that a batch of
 * records is one tensor and nothing is copied (AttMEMO, section 5.3, "Solution based on memory mapping": instead of
 * gathering, change the page table). A window reserves its addresses once. map_slots() puts pages there, show()
 * hands out a tensor over them, darken() makes them inaccessible, close() gives the addresses back.
 *
 * WHAT IT PROMISES
 *   - Nothing outside [address, address + capacity) is ever mapped or unmapped. MAP_FIXED removes what lies in its way
 *     without a word, so it is used only inside the range that this very object reserved.
 *   - After map_slots() returned normally: slot i is at address + i * slot_bytes and shows the bytes of the file at
 *     header + slots[i] * slot_bytes; every address after the last slot is inaccessible.
 *   - After map_slots() failed: every address of the window is inaccessible. Not one old slot beside a new one: half a batch
 *     of another layer's records looks like a perfectly plausible result.
 *   - While a tensor refers to the memory (a lease) the pages stay as they are: map_slots(), darken() and close() are
 *     refused.
 *   - Input never ends the process. No exit, no print, no assert on anything that came from outside.
 *
 * TRUST BOUNDARY.  Slot numbers come from a catalogue on disk, and files travel between machines: every number below
 * is taken to be chosen by an attacker. All of it is copied and checked, with overflow-checked arithmetic, before the
 * first page moves; the copy matters, because the GIL is released while pages move and a Python array can change.
 *
 * WHAT IT REFUSES TO BE
 *   - A place to write. Pages are PROT_READ: a stray store faults here and now, instead of changing the database for
 *     every later reader. An in-place operation on a tensor over a window therefore dies of SIGSEGV.
 *   - A guard against a file that shrinks while it is mapped. The size is checked at each map_slots(); a file cut short
 *     after that raises SIGBUS on the next read, as with every mmap. Published arenas are immutable.
 *   - Something to inherit. After fork() the methods raise in the child: its pages are its own, but its caller is most
 *     likely a worker that believes it shares something.
 *
 * ROADS NOT TAKEN
 *   - MAP_FIXED at an address handed over by Python: one wrong integer silently replaces malloc's arena or a thread's
 *     stack. The interface speaks of slot numbers, never of addresses.
 *   - Unmapping between batches: the gap could be filled by another thread's mmap, which the next MAP_FIXED would
 *     destroy. Collapsing puts PROT_NONE pages there, in one step, and keeps the addresses taken.
 *   - One file, or one mapping, for each record (the paper keeps "each APM ... as a file object in memory"): 96,000
 *     records are more than vm.max_map_count (65,530 by default) and than most limits on open files. One file and N
 *     offsets cost at most as many mappings as the batch has slots, and neighbours in the file share one.
 *   - Carrying on after an mmap that failed at vm.max_map_count (ENOMEM): the kernel leaves the page that was there
 *     before, still readable. Hence take_away(). It is made so that it works exactly then.
 *   - remap_file_pages(): emulated with the same mappings since Linux 4.0. mremap() with an old size of 0, which
 *     duplicates a part of one mapping of the whole file: 1.15 microseconds a slot against 0.97 for mmap(). Leaving a
 *     hole for the slots, so that no reservation need be split: as fast as mapping PROT_NONE over it, and a gap for
 *     other threads. Transparent copying on failure: the caller knows better where to copy to.
 *
 * WHAT IT COSTS.  64 slots of 6 MiB, microseconds, everything in the caches / nothing there, as after a layer's work:
 *     over PROT_NONE, then taken away        90 + 24 / 179 + 29    each slot splits the reservation
 *     over the batch before, then darkened   50 + 7 / 120 + 22     each slot replaces a mapping of its size
 * The bare system calls of the first line in a small program: 62 + 17. Hence darken(). Mappings that are replaced while they have pages
 * cost an interrupt of the other processors each, hence forget_pages(). MAP_POPULATE adds 110 / 250 for 2 MiB pages,
 * whose faults while the slots are read cost next to nothing; for 4 KiB pages it is the faults that cost more. Hence
 * `populate` is the caller's choice.
 *
 * A LIMIT OF THE KERNEL.  Before Linux 6.12 a failed MAP_FIXED may leave a hole (it unmaps first, then fails), which
 * another thread's mmap could occupy in the moment before take_away() takes it back. It needs the kernel itself to be
 * out of memory for a mapping's bookkeeping; the failures met in practice (vm.max_map_count, wrong descriptor) are
 * found before anything is unmapped.
 *
 * ERRORS.  The C functions fill a verdict; raise_verdict() is the one place that turns it into an exception:
 * ValueError (a rule broken by the arguments or by the state), BufferError (in use), OSError (a system call failed).
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h> /* first, as CPython asks; also defines _GNU_SOURCE */

#include <errno.h>
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <linux/magic.h> /* HUGETLBFS_MAGIC */
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h> /* fstatfs */
#include <unistd.h>

#define RESERVED (MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE) /* addresses only: no memory, no swap accounting */

typedef struct Window {
    PyObject_HEAD
    char *base;         /* first byte; NULL once closed */
    size_t capacity;    /* bytes reserved, a multiple of alignment */
    size_t alignment;   /* of base: a power of two, at least a page */
    size_t mapped;      /* bytes [0, mapped) show what the last map_slots() asked for: the only bytes that may be read */
    size_t high;        /* bytes [0, high) may hold file mappings; high >= mapped. [high, capacity) never does */
    void *spare;        /* one page, mapped only to be given up when the process is out of mappings; or NULL */
    Py_ssize_t leases;  /* tensors whose memory is still referred to */
    pid_t creator;      /* a fork()ed child is not the creator */
    bool moving;        /* pages are moving with the GIL released: all other calls are refused */
    bool dark;          /* [0, high) is inaccessible and has no pages, although it may have mappings */
    bool broken;        /* the pages could not be taken away: the contents are unknown, so they are not shown until one succeeds */
} Window;

/*
 * A tensor over the window, as DLPack 0 describes one to PyTorch. It is a lease that ends with the tensor's memory:
 * views, slices and what autograd saved included. Not by torch.frombuffer() and as_strided(): those two cost 70
 * microseconds when their code is not in the cache, half as much as mapping 64 slots, and this one call 40.
 *
 * The layout of these structures is DLPack's (dmlc/dlpack, dlpack.h), which has not changed since 2017.
 */
typedef struct {
    void *data;
    struct {
        int32_t type, id; /* 1, 0: the processor */
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides; /* strides in items */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor tensor;
    void *context;
    void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;

enum { DIMENSIONS = 8 };

typedef struct {
    DLManagedTensor managed; /* first: a pointer to it is a pointer to this */
    Window *window;          /* a reference, and one of its leases */
    int64_t shape[DIMENSIONS + 1], strides[DIMENSIONS + 1];
} Shown;

/* What a C function has to say. `text` is a literal: the rule that was broken, or the call that failed. */
typedef struct {
    enum { FINE, REFUSED, BUSY, FAILED } kind;
    const char *text;
    Py_ssize_t slot; /* the slot to blame, or -1 */
    long long seen;  /* REFUSED: the offending value and its limit, where has_values */
    long long limit;
    bool has_values;
    int code; /* FAILED: errno */
} Verdict;

static const Verdict fine = {FINE, NULL, -1, 0, 0, false, 0};

static Verdict refused(const char *rule)
{
    return (Verdict){REFUSED, rule, -1, 0, 0, false, 0};
}

static Verdict refused_value(const char *rule, Py_ssize_t slot, long long seen, long long limit)
{
    return (Verdict){REFUSED, rule, slot, seen, limit, true, 0};
}

static Verdict busy(const char *why)
{
    return (Verdict){BUSY, why, -1, 0, 0, false, 0};
}

static Verdict failed(const char *call, Py_ssize_t slot, int code)
{
    return (Verdict){FAILED, call, slot, 0, 0, false, code};
}

/* The one place that raises. Returns NULL so that callers can return it. */
static PyObject *raise_verdict(Verdict v)
{
    char where[48] = "";
    if (v.slot >= 0)
        PyOS_snprintf(where, sizeof where, "slot %zd: ", v.slot);

    switch (v.kind) {
    case FINE:
        PyErr_SetString(PyExc_SystemError, "attmemo.mmap._window: an error was raised for a verdict that is fine");
        break;
    case REFUSED:
        if (v.has_values)
            PyErr_Format(PyExc_ValueError, "%s%s (seen %lld, limit %lld)", where, v.text, v.seen, v.limit);
        else
            PyErr_Format(PyExc_ValueError, "%s%s", where, v.text);
        break;
    case BUSY:
        PyErr_SetString(PyExc_BufferError, v.text);
        break;
    case FAILED: {
        PyObject *text = PyUnicode_FromFormat("%s%s: %s", where, v.text, strerror(v.code));
        PyObject *arguments = text ? Py_BuildValue("(iN)", v.code, text) : NULL; /* N: takes the reference to text */
        if (arguments) {
            PyErr_SetObject(PyExc_OSError, arguments); /* OSError(errno, text): picks the subclass, as for a syscall */
            Py_DECREF(arguments);
        }
        break;
    }
    }
    return NULL;
}

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* ---- state ---------------------------------------------------------------------------------------------------- */

/* May this caller touch the window at all? */
static Verdict check_owned(const Window *w)
{
    if (!w->base)
        return refused("the window is closed");
    if (w->creator != getpid())
        return refused("the window belongs to the process that made it, and this is a fork of that process: "
                       "make a new window here");
    if (w->moving)
        return busy("another thread is changing this window");
    return fine;
}

/* May its contents be shown, or replaced? */
static Verdict check_sound(const Window *w)
{
    Verdict v = check_owned(w);
    if (v.kind == FINE && w->broken)
        return refused("the window is in an unknown state since its pages could not be taken away: "
                       "darken() or close() it");
    return v;
}

/* May its pages change? */
static Verdict check_idle(const Window *w)
{
    Verdict v = check_owned(w);
    if (v.kind == FINE && w->leases > 0)
        return busy("the window is leased: changing its pages would change a tensor in use");
    return v;
}

/* ---- the dangerous part: no Python API below, so that it can run without the GIL -------------------------------- */

/*
 * The spare. Above vm.max_map_count mmap() is refused outright, even the one that would replace fifty mappings by one;
 * only munmap() is not. Unmapping part of the window would leave a hole for other threads to fall into, so each window
 * keeps one mapping elsewhere that it can afford to lose. Shared, because two such never merge into one: giving up
 * half of a merged mapping would be a split, refused at the limit as well. Having none is no error, only less
 * certainty.
 */
static void stock_spare(Window *w)
{
    if (w->spare)
        return;
    void *page = mmap(NULL, page_bytes(), PROT_NONE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (page != MAP_FAILED)
        w->spare = page;
}

static bool spend_spare(Window *w)
{
    bool spent = w->spare && munmap(w->spare, page_bytes()) == 0;
    w->spare = NULL;
    return spent;
}

/* Reserve `capacity` bytes at a multiple of `alignment`: take more, give both ends back. */
static Verdict reserve(Window *w, size_t capacity, size_t alignment)
{
    size_t page = page_bytes(), whole;
    if (alignment < page || (alignment & (alignment - 1)) != 0)
        return refused_value("alignment must be a power of two and at least a page", -1, (long long)alignment,
                             (long long)page);
    if (capacity == 0)
        return refused("capacity must be positive");
    if (__builtin_add_overflow(capacity, alignment - 1, &capacity))
        return refused("capacity is too large for an address");
    capacity &= ~(alignment - 1); /* rounded up: a huge page at the end must not stick out of the window */
    if (__builtin_add_overflow(capacity, alignment - page, &whole) || whole > PTRDIFF_MAX)
        return refused("capacity is too large for an address");

    char *start = mmap(NULL, whole, PROT_NONE, RESERVED, -1, 0);
    if (start == MAP_FAILED)
        return failed("mmap (reserving the window)", -1, errno);
    size_t before = (size_t)(-(uintptr_t)start & (alignment - 1));
    size_t after = whole - before - capacity;
    /* What has been given back is no longer ours, so a failure after it must not unmap it a second time: by then
       another thread may live there. */
    if (after && munmap(start + before + capacity, after) != 0) {
        Verdict v = failed("munmap (trimming the reservation)", -1, errno);
        munmap(start, whole);
        return v;
    }
    if (before && munmap(start, before) != 0) {
        Verdict v = failed("munmap (trimming the reservation)", -1, errno);
        munmap(start, before + capacity);
        return v;
    }
    w->base = start + before;
    w->capacity = capacity;
    w->alignment = alignment;
    stock_spare(w);
    return fine;
}

/*
 * Make [from, high) inaccessible while keeping the addresses. Returns 0 or errno.
 *
 * It must work when the process is out of mappings, because that is when it is needed. Therefore it replaces the range
 * up to `high`, not up to capacity: both ends of that range are already ends of mappings, so the kernel need not split
 * one (a split is a new mapping), whereas the end of the reservation may have been merged with a neighbour's. If
 * mmap() is refused all the same, the spare is given up for it. If even that is not enough (the limit was lowered
 * meanwhile), mprotect() needs no mapping: the window is dark then, and its file mappings go at the next call that
 * succeeds.
 */
static int take_away(Window *w, size_t from)
{
    int code;
    if (from >= w->high)
        return 0;
    do {
        if (mmap(w->base + from, w->high - from, PROT_NONE, RESERVED | MAP_FIXED, -1, 0) != MAP_FAILED) {
            w->high = from;
            stock_spare(w);
            return 0;
        }
        code = errno;
    } while (spend_spare(w));
    if (from == 0 && mprotect(w->base, w->high, PROT_NONE) == 0)
        return 0;
    return code;
}

/*
 * Forget the pages of the window, all at once. Whether this works makes a difference in time only: every
 * mapping that is replaced while it has pages costs an interrupt of all other processors that run this process.
 */
static void forget_pages(Window *w)
{
    if (w->high > 0 && !w->dark)
        (void)madvise(w->base, w->high, MADV_DONTNEED);
}

/* The granule in which this file can be mapped: a page, or the huge page of a hugetlbfs file. */
static Verdict file_granule(int fd, const struct stat *st, size_t *granule)
{
    struct statfs fs;
    *granule = page_bytes();
    if ((size_t)st->st_blksize <= *granule) /* hugetlbfs gives its page here; so may others give what they like */
        return fine;
    if (fstatfs(fd, &fs) != 0)
        return failed("fstatfs", -1, errno);
    if (fs.f_type == (__typeof__(fs.f_type))HUGETLBFS_MAGIC)
        *granule = (size_t)fs.f_bsize;
    return fine;
}

/* Everything that can be known before a page moves. */
static Verdict check_slots(const Window *w, int fd, const int64_t *offsets, size_t count, size_t slot, size_t least,
                           size_t *total)
{
    struct stat st;
    size_t granule;

    if (fstat(fd, &st) != 0)
        return failed("fstat", -1, errno);
    if (!S_ISREG(st.st_mode))
        return refused("the descriptor is not a regular file");
    if (st.st_size < 0 || (uint64_t)st.st_size < least)
        return refused_value("the file is shorter than its slots", -1, (long long)st.st_size, (long long)least);
    Verdict v = file_granule(fd, &st, &granule);
    if (v.kind != FINE)
        return v;
    /* For a hugetlbfs file the kernel rounds the length of a mapping UP to its page, so a short slot at the end of the
       window would destroy what follows the window. Multiples of the file's own page leave nothing to round. */
    if (granule > w->alignment)
        return refused_value("the pages of this file are larger than the alignment of the window", -1,
                             (long long)granule, (long long)w->alignment);
    if (slot == 0 || slot % granule != 0)
        return refused_value("slot_bytes must be a positive multiple of the page size", -1, (long long)slot,
                             (long long)granule);
    if (__builtin_mul_overflow(count, slot, total) || *total > w->capacity)
        return refused_value("the slots do not fit in the window: count * slot_bytes exceeds its capacity", -1,
                             (long long)count, (long long)(w->capacity / slot));

    for (size_t i = 0; i < count; i++) {
        if (offsets[i] < 0)
            return refused_value("the offset is negative", (Py_ssize_t)i, offsets[i], 0);
        if ((uint64_t)offsets[i] % granule != 0)
            return refused_value("the offset is not a multiple of the page size", (Py_ssize_t)i, offsets[i],
                                 (long long)granule);
        /* slot <= capacity <= PTRDIFF_MAX, and written as a difference so that nothing can wrap */
        if (offsets[i] > st.st_size || (uint64_t)(st.st_size - offsets[i]) < slot)
            return refused_value("the slot would end after the end of the file", (Py_ssize_t)i, offsets[i],
                                 (long long)st.st_size);
    }
    return fine;
}

/*
 * Move the pages. All or nothing: on failure nothing in the window is accessible.
 *
 * `huge` says that a part of the file that is not in memory yet may be read in pieces of 2 MiB, which the page cache
 * then keeps as such, here and for whatever maps them later. It is a wish: a kernel without this says so.
 */
static Verdict move_pages(Window *w, int fd, const int64_t *offsets, size_t count, size_t slot, bool populate,
                          bool huge)
{
    int flags = MAP_FIXED | MAP_SHARED | (populate ? MAP_POPULATE : 0);
    Verdict v = fine;
    int code;

    /* What an earlier, larger batch left behind the last slot goes first: it also frees mappings. */
    forget_pages(w);
    w->dark = false;
    if ((code = take_away(w, count * slot)) != 0)
        v = failed("mmap (clearing the rest of the window)", -1, code);

    for (size_t first = 0; v.kind == FINE && first < count;) {
        size_t run = 1; /* neighbours in the file become one mapping */
        while (first + run < count && offsets[first + run] - offsets[first + run - 1] == (int64_t)slot)
            run++;
        size_t end = (first + run) * slot;
        if (end > w->high)
            w->high = end; /* before the call: a failed MAP_FIXED may have changed this part too */
        if (mmap(w->base + first * slot, run * slot, PROT_READ, flags, fd, (off_t)offsets[first]) == MAP_FAILED)
            v = failed("mmap", (Py_ssize_t)first, errno);
        first += run;
    }
    if (v.kind == FINE && huge && count > 0)
        (void)madvise(w->base, count * slot, MADV_HUGEPAGE);

    if (v.kind != FINE && take_away(w, 0) != 0)
        w->broken = true; /* cannot be made dark, so it is never shown again */
    return v;
}

/* ---- the type ------------------------------------------------------------------------------------------------- */

/* Integers of any size become a size or ValueError; PyArg's own "n" would raise OverflowError for a large one. */
static int to_size(PyObject *object, void *out)
{
    Py_ssize_t value = PyNumber_AsSsize_t(object, PyExc_ValueError);
    if (value == -1 && PyErr_Occurred())
        return 0;
    if (value < 0) {
        raise_verdict(refused_value("a size must not be negative", -1, value, 0));
        return 0;
    }
    *(size_t *)out = (size_t)value;
    return 1;
}

static int to_descriptor(PyObject *object, void *out)
{
    Py_ssize_t value = PyNumber_AsSsize_t(object, PyExc_ValueError);
    if (value == -1 && PyErr_Occurred())
        return 0;
    if (value < 0 || value > INT_MAX) {
        raise_verdict(refused_value("not a file descriptor", -1, value, INT_MAX));
        return 0;
    }
    *(int *)out = (int)value;
    return 1;
}

static PyObject *window_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", "alignment", NULL};
    size_t capacity, alignment;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:Window", names, to_size, &capacity, to_size, &alignment))
        return NULL;
    Window *w = (Window *)type->tp_alloc(type, 0); /* zero-filled */
    if (!w)
        return NULL;
    w->creator = getpid();
    Verdict v = reserve(w, capacity, alignment);
    if (v.kind != FINE) {
        Py_DECREF(w);
        return raise_verdict(v);
    }
    return (PyObject *)w;
}

static void window_dealloc(PyObject *self)
{
    Window *w = (Window *)self;
    PyTypeObject *type = Py_TYPE(self);
    /* A tensor owns a reference, so there is none now. In a forked child munmap() touches only the child's copy of the
       address space, so there is nothing to spare. */
    if (w->base)
        munmap(w->base, w->capacity);
    spend_spare(w);
    type->tp_free(self);
    Py_DECREF(type); /* a heap type is counted by its instances */
}

/* Copy the slot numbers out of any one-dimensional buffer of 64-bit signed integers. */
static int64_t *copy_slots(PyObject *object, size_t *count)
{
    Py_buffer view;
    int64_t *copy = NULL;
    if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0)
        return NULL;
    const char *format = view.format ? view.format : "B";
    if (*format == '@' || *format == '=' || (*format == '<' && PY_LITTLE_ENDIAN) || (*format == '>' && PY_BIG_ENDIAN))
        format++;
    if (view.ndim != 1 || view.itemsize != (Py_ssize_t)sizeof(int64_t) ||
        (strcmp(format, "q") != 0 && strcmp(format, "l") != 0)) {
        raise_verdict(refused("slots must be a one-dimensional buffer of 64-bit signed integers, "
                              "such as array('q') or a numpy int64 array"));
    } else {
        *count = (size_t)view.len / sizeof(int64_t);
        copy = PyMem_Malloc(view.len ? (size_t)view.len : 1); /* that many exist: nothing overflows */
        if (!copy)
            PyErr_NoMemory();
        else if (view.len)
            memcpy(copy, view.buf, (size_t)view.len);
    }
    PyBuffer_Release(&view);
    return copy;
}

/* Turn slot numbers into offsets, in place. Returns the position of the first that is no slot, or -1. */
static Py_ssize_t to_offsets(int64_t *slots, size_t count, size_t header, size_t stride, size_t limit)
{
    for (size_t i = 0; i < count; i++) {
        if (slots[i] < 0 || (uint64_t)slots[i] >= limit)
            return (Py_ssize_t)i;
        slots[i] = (int64_t)(header + (size_t)slots[i] * stride); /* fits: the caller saw where the last one ends */
    }
    return -1;
}

PyDoc_STRVAR(map_slots_doc,
             "map_slots($self, /, fd, slots, header, slot_bytes, limit, populate=True, huge=False)\n--\n\n"
             "Show slot_bytes bytes of the file at header + slot * slot_bytes for each of `slots`, side by side from the\n"
             "start of the window. The file must hold `limit` such slots. `huge`: ask that the kernel reads what is not in\n"
             "memory in pieces of 2 MiB.\n\n"
             "Everything is checked before a page moves; if a system call fails the whole window is inaccessible.\n"
             "Raises ValueError (a rule is broken), IndexError (a slot is not in [0, limit)), BufferError (leased), OSError\n"
             "(errno, which call, which slot).");

static PyObject *window_map_slots(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "slots", "header", "slot_bytes", "limit", "populate", "huge", NULL};
    PyObject *sequence;
    size_t header, slot, limit, count, end;
    int fd, populate = 1, huge = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&OO&O&O&|pp:map_slots", names, to_descriptor, &fd, &sequence,
                                     to_size, &header, to_size, &slot, to_size, &limit, &populate, &huge))
        return NULL;
    if (__builtin_mul_overflow(limit, slot, &end) || __builtin_add_overflow(end, header, &end) || end > INT64_MAX)
        return raise_verdict(refused("so many slots of this size do not fit in a file"));
    int64_t *offsets = copy_slots(sequence, &count); /* may run Python code: so the state is checked after it */
    if (!offsets)
        return NULL;
    Py_ssize_t bad = to_offsets(offsets, count, header, slot, limit);
    if (bad >= 0) {
        PyErr_Format(PyExc_IndexError, "slot %lld does not exist: there are %zu, from 0", (long long)offsets[bad], limit);
        PyMem_Free(offsets);
        return NULL;
    }
    Window *w = (Window *)self;
    size_t total = 0;
    Verdict v = check_sound(w);
    if (v.kind == FINE)
        v = check_idle(w);
    if (v.kind == FINE) {
        w->moving = true;
        Py_BEGIN_ALLOW_THREADS /* fstat on a network file system can block, and populating reads the disk */
        v = check_slots(w, fd, offsets, count, slot, end, &total);
        if (v.kind == FINE) {
            w->mapped = 0;
            v = move_pages(w, fd, offsets, count, slot, populate != 0, huge != 0);
            if (v.kind == FINE)
                w->mapped = total;
        }
        Py_END_ALLOW_THREADS
        w->moving = false;
    }
    PyMem_Free(offsets);
    if (v.kind != FINE)
        return raise_verdict(v);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(darken_doc, "darken($self, /)\n--\n\n"
                         "Make the window inaccessible, leaving it to the next map_slots() to take the mappings away:\n"
                         "a slot mapped over one of the same size splits nothing.\n\n"
                         "Raises BufferError while the window is leased, OSError if the kernel refuses.");

static PyObject *window_darken(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Window *w = (Window *)self;
    Verdict v = check_idle(w);
    if (v.kind == FINE && w->high > 0) {
        int code = 0;
        w->mapped = 0;
        w->moving = true;
        Py_BEGIN_ALLOW_THREADS
        forget_pages(w);
        w->dark = mprotect(w->base, w->high, PROT_NONE) == 0; /* [0, high) is whole mappings: nothing is split */
        if (!w->dark)
            code = take_away(w, 0);
        Py_END_ALLOW_THREADS
        w->moving = false;
        w->broken = code != 0;
        if (code != 0)
            v = failed("mmap (clearing the window)", -1, code);
    }
    if (v.kind != FINE)
        return raise_verdict(v);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(close_doc, "close($self, /)\n--\n\n"
                        "Give the addresses back. Closing twice is fine. Raises BufferError while a tensor is held.");

static PyObject *window_close(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    Window *w = (Window *)self;
    if (!w->base)
        Py_RETURN_NONE;
    Verdict v = check_idle(w);
    if (v.kind == FINE) {
        if (munmap(w->base, w->capacity) == 0) {
            spend_spare(w);
            w->base = NULL;
            w->capacity = w->mapped = w->high = 0;
        } else {
            v = failed("munmap", -1, errno);
        }
    }
    if (v.kind != FINE)
        return raise_verdict(v);
    Py_RETURN_NONE;
}

static PyObject *get_capacity(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((Window *)self)->capacity);
}

/* ---- tensors ---------------------------------------------------------------------------------------------------- */

/* A tensor may be let go by any thread, with or without the GIL. */
static void let_go(DLManagedTensor *managed)
{
    Shown *shown = (Shown *)managed;
    if (!Py_IsInitialized()) /* the interpreter went first: so does the process */
        return;
    PyGILState_STATE state = PyGILState_Ensure();
    shown->window->leases--;
    Py_DECREF(shown->window);
    PyMem_Free(shown);
    PyGILState_Release(state);
}

static void capsule_free(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, "dltensor")) /* not taken: the taker renames it */
        let_go(PyCapsule_GetPointer(capsule, "dltensor"));
}

PyDoc_STRVAR(show_doc, "show($self, shape, slot_bytes, code, bits, /)\n--\n\n"
                       "The slots mapped now as a DLPack capsule of shape [count, *shape], of items of the DLPack type\n"
                       "`code` of so many `bits`. The taker holds a lease. The memory is read-only, which this\n"
                       "version of DLPack cannot say. Raises ValueError if nothing is mapped or a number does not fit.");

static PyObject *window_show(PyObject *self, PyObject *args)
{
    Window *w = (Window *)self;
    PyObject *shape;
    size_t slot, items = 1;
    int code, bits;
    if (!PyArg_ParseTuple(args, "O!O&ii:show", &PyTuple_Type, &shape, to_size, &slot, &code, &bits))
        return NULL;
    Verdict v = check_sound(w);
    Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    if (v.kind == FINE && (code < 0 || code > 255 || bits < 8 || bits > 64 || bits % 8 || ndim > DIMENSIONS))
        v = refused("there are no such items, or too many dimensions");
    if (v.kind == FINE && (slot == 0 || slot % ((size_t)bits / 8) != 0))
        v = refused("slot_bytes must be a positive number of whole items");
    if (v.kind == FINE && w->mapped / slot == 0)
        v = refused("the window has no slots of this size mapped");
    if (v.kind != FINE)
        return raise_verdict(v);

    Shown *shown = PyMem_Calloc(1, sizeof *shown);
    if (!shown)
        return PyErr_NoMemory();
    for (Py_ssize_t i = ndim; i > 0; i--) {
        size_t size = PyLong_AsSize_t(PyTuple_GET_ITEM(shape, i - 1));
        shown->shape[i] = (int64_t)size;
        shown->strides[i] = (int64_t)items;
        if (PyErr_Occurred() || size == 0 || __builtin_mul_overflow(items, size, &items) ||
            items > slot / ((size_t)bits / 8)) {
            PyMem_Free(shown);
            return PyErr_Occurred() ? NULL : raise_verdict(refused("a slot has no room for this shape"));
        }
    }
    shown->shape[0] = (int64_t)(w->mapped / slot);
    shown->strides[0] = (int64_t)(slot / ((size_t)bits / 8));
    shown->window = w;
    shown->managed.tensor = (DLTensor){.data = w->base,
                                       .device = {1, 0},
                                       .ndim = (int32_t)ndim + 1,
                                       .dtype = {(uint8_t)code, (uint8_t)bits, 1},
                                       .shape = shown->shape,
                                       .strides = shown->strides};
    shown->managed.deleter = let_go;
    PyObject *capsule = PyCapsule_New(shown, "dltensor", capsule_free);
    if (!capsule) {
        PyMem_Free(shown);
        return NULL;
    }
    Py_INCREF(self);
    w->leases++;
    return capsule;
}

static PyMethodDef window_methods[] = {
    {"map_slots", (PyCFunction)(void (*)(void))window_map_slots, METH_VARARGS | METH_KEYWORDS, map_slots_doc},
    {"show", window_show, METH_VARARGS, show_doc},
    {"darken", window_darken, METH_NOARGS, darken_doc},
    {"close", window_close, METH_NOARGS, close_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef window_getset[] = {
    {"capacity", get_capacity, NULL, "Bytes reserved: what was asked, rounded up to the alignment.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(window_doc,
             "Window(capacity, alignment)\n--\n\n"
             "A reserved range of at least `capacity` bytes at a multiple of `alignment` (a power of two, in bytes),\n"
             "into which slots of a file are mapped side by side, read-only.");

static PyType_Slot window_slots[] = {
    {Py_tp_doc, (void *)window_doc},
    {Py_tp_new, window_new},
    {Py_tp_dealloc, window_dealloc},
    {Py_tp_methods, window_methods},
    {Py_tp_getset, window_getset},
    {0, NULL},
};

static PyType_Spec window_spec = {
    .name = "attmemo.mmap._window.Window",
    .basicsize = sizeof(Window),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, /* not a base class: a subclass could forget our dealloc */
    .slots = window_slots,
};

/* ---- the module ----------------------------------------------------------------------------------------------- */

static int native_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &window_spec, NULL);
    if (!type)
        return -1;
    int result = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return result;
}

static PyModuleDef_Slot native_slots[] = {
    {Py_mod_exec, native_exec},
    {0, NULL},
};

static struct PyModuleDef native_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "attmemo.mmap._window",
    .m_doc = "What Python cannot do with pages. See native/window.c.",
    .m_size = 0,
    .m_slots = native_slots,
};

PyMODINIT_FUNC PyInit__window(void)
{
    return PyModuleDef_Init(&native_module);
}
