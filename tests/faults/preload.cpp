// Makes the n-th call of one kind fail, in the process that it is preloaded into (LD_PRELOAD). It counts the calls that
// are made for Umbra: calls on files below one folder, memory that the native module or PyTorch's CPU allocator asks for,
// threads that are started, and sends on sockets. It can also write down, in their order, the calls that change files,
// and move the wall clock. What it does is in one block of memory, which forked processes share with their parent.
//
// tests/faults/preload.py has the same block and the same kinds.
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

enum Kind {
    kNew,
    kTensor,
    kMmap,
    kMadvise,
    kMbind,
    kOpen,
    kRead,
    kWrite,
    kRename,
    kSync,
    kMkdir,
    kThread,
    kSend,
    kKinds
};

struct Block {
    std::atomic<int64_t> counts[kKinds];
    int64_t first, last;  // the calls of `kind` that fail, counted from 1; none if `first` is 0
    int32_t kind, error;
    int32_t log;          // the descriptor that calls are written to, or -1
    int64_t clock_s;      // added to the wall clock
    char root[PATH_MAX];  // files below this folder count
    char what[PATH_MAX];  // the file of the call that failed first, or the size of the memory
};

Block* block = nullptr;
std::atomic<bool> on{false};  // in this process
uintptr_t native_begin = 0, native_end = 0, torch_begin = 0, torch_end = 0;

template <class F>
F* real(F*, const char* name) {
    return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}
#define REAL(name) static auto* const next = real(&name, #name)

bool counting() { return on.load(std::memory_order_relaxed); }

// Counts a call; whether it is to fail. `path` is what it concerns.
bool fails(Kind kind, const char* path = "") {
    const int64_t number = block->counts[kind].fetch_add(1) + 1;
    if (kind != block->kind || number < block->first || number > block->last) return false;
    if (number == block->first) {
        strncpy(block->what, path, sizeof block->what - 1);
        if (getenv("FAULTS_STACK")) {  // to see who calls
            void* stack[40];
            backtrace_symbols_fd(stack, backtrace(stack, 40), 2);
        }
    }
    errno = block->error;
    return true;
}

bool below_root(const char* path) {
    const size_t length = strlen(block->root);
    return length && strncmp(path, block->root, length) == 0;
}

// The absolute name of a file, as far as this needs no resolving of links.
const char* absolute(int folder, const char* path, char* room) {
    if (path[0] == '/') return path;
    char link[64];
    if (folder == AT_FDCWD)
        strcpy(link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    const ssize_t length = readlink(link, room, PATH_MAX - 1);
    if (length < 0) return path;
    snprintf(room + length, PATH_MAX - length, "/%s", path);
    return room;
}

// The name of an open file below the root, else null.
const char* file_of(int fd, char* room) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const int before = errno;
    const ssize_t length = readlink(link, room, PATH_MAX - 1);
    errno = before;
    if (length <= 0) return nullptr;
    room[length] = 0;
    return below_root(room) ? room : nullptr;
}

void note(const char* call, const char* path, const char* to = "") {
    if (!block || block->log < 0) return;
    char line[2 * PATH_MAX + 64];
    const int length = snprintf(line, sizeof line, "%s\t%s\t%s\n", call, path, to);
    syscall(SYS_write, block->log, line, length);
}

// Whether the call on a file by name is to fail; a call that succeeds is written down by `note` afterwards.
bool fails_at(Kind kind, int folder, const char* path) {
    char room[PATH_MAX];
    const char* name = absolute(folder, path, room);
    return below_root(name) && fails(kind, name);
}

bool fails_on(Kind kind, int fd) {
    char room[PATH_MAX];
    const char* name = file_of(fd, room);
    return name && fails(kind, name);
}

void note_at(const char* call, int folder, const char* path, const char* to = "") {
    char room[PATH_MAX];
    const char* name = absolute(folder, path, room);
    if (below_root(name)) note(call, name, to);
}

void note_on(const char* call, int fd) {
    char room[PATH_MAX];
    if (const char* name = file_of(fd, room)) note(call, name);
}

bool within(const void* address, uintptr_t begin, uintptr_t end) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return begin <= at && at < end;
}

int find_modules(dl_phdr_info* info, size_t, void*) {
    uintptr_t *begin = nullptr, *end = nullptr;
    if (strstr(info->dlpi_name, "/_native.")) begin = &native_begin, end = &native_end;
    if (strstr(info->dlpi_name, "/libc10.so")) begin = &torch_begin, end = &torch_end;
    for (int i = 0; begin && i < info->dlpi_phnum; i++)
        if (const auto& part = info->dlpi_phdr[i]; part.p_type == PT_LOAD && part.p_flags & PF_X) {
            *begin = info->dlpi_addr + part.p_vaddr;
            *end = *begin + part.p_memsz;
        }
    return 0;
}

bool new_fails(const void* caller, size_t size) {
    if (!counting() || !within(caller, native_begin, native_end)) return false;
    char what[32];
    snprintf(what, sizeof what, "%zu bytes", size);
    return fails(kNew, what);
}

}  // namespace

extern "C" {

// The block, in memory that forked processes share.
Block* faults_block() {
    if (!block) {
        void* memory = mmap(nullptr, sizeof(Block), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) abort();
        block = new (memory) Block{};
        block->log = -1;
    }
    return block;
}

// From now on this process's calls count, or no longer. All modules are loaded.
void faults_count(bool wanted) {
    dl_iterate_phdr(find_modules, nullptr);
    on = wanted;
}

int posix_memalign(void** memory, size_t alignment, size_t size) noexcept {
    REAL(posix_memalign);
    if (counting() && within(__builtin_return_address(0), torch_begin, torch_end) && fails(kTensor)) return ENOMEM;
    return next(memory, alignment, size);
}

void* mmap(void* at, size_t length, int protection, int flags, int fd, off_t offset) noexcept {
    REAL(mmap);
    if (counting()) {
        const bool ours = within(__builtin_return_address(0), native_begin, native_end);
        char room[PATH_MAX];
        const char* name = fd >= 0 ? file_of(fd, room) : "";
        if (name && (ours || fd >= 0) && fails(kMmap, name)) return MAP_FAILED;
    }
    return next(at, length, protection, flags, fd, offset);
}

void* mmap64(void* at, size_t length, int protection, int flags, int fd, off_t offset) noexcept {
    REAL(mmap64);
    if (counting() && fd >= 0 && fails_on(kMmap, fd)) return MAP_FAILED;
    return next(at, length, protection, flags, fd, offset);
}

int madvise(void* at, size_t length, int advice) noexcept {
    REAL(madvise);
    if (counting() && within(__builtin_return_address(0), native_begin, native_end) && fails(kMadvise)) return -1;
    return next(at, length, advice);
}

long syscall(long number, ...) noexcept {
    REAL(syscall);
    va_list list;
    va_start(list, number);
    long a[6];
    for (long& each : a) each = va_arg(list, long);
    va_end(list);
    if (number == SYS_mbind && counting() && fails(kMbind)) return -1;
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#define OPEN(name, folder, ...)                                                           \
    if (counting() && fails_at(kOpen, folder, path)) return -1;                           \
    mode_t mode = 0;                                                                      \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                  \
        va_list list;                                                                     \
        va_start(list, flags);                                                            \
        mode = va_arg(list, mode_t);                                                      \
        va_end(list);                                                                     \
    }                                                                                     \
    REAL(name);                                                                           \
    const int fd = next(__VA_ARGS__);                                                     \
    if (fd >= 0 && block && flags & (O_CREAT | O_TRUNC)) note_at("create", folder, path); \
    return fd;

int open(const char* path, int flags, ...) { OPEN(open, AT_FDCWD, path, flags, mode) }
int open64(const char* path, int flags, ...) { OPEN(open64, AT_FDCWD, path, flags, mode) }
int openat(int folder, const char* path, int flags, ...) { OPEN(openat, folder, folder, path, flags, mode) }
int openat64(int folder, const char* path, int flags, ...){OPEN(openat64, folder, folder, path, flags, mode)}

FILE* fopen(const char* path, const char* mode) {
    REAL(fopen);
    if (counting() && fails_at(kOpen, AT_FDCWD, path)) return nullptr;
    return next(path, mode);
}

FILE* fopen64(const char* path, const char* mode) {
    REAL(fopen64);
    if (counting() && fails_at(kOpen, AT_FDCWD, path)) return nullptr;
    return next(path, mode);
}

ssize_t read(int fd, void* to, size_t length) {
    REAL(read);
    if (counting() && fails_on(kRead, fd)) return -1;
    return next(fd, to, length);
}

ssize_t pread(int fd, void* to, size_t length, off_t offset) {
    REAL(pread);
    if (counting() && fails_on(kRead, fd)) return -1;
    return next(fd, to, length, offset);
}

ssize_t pread64(int fd, void* to, size_t length, off_t offset) {
    REAL(pread64);
    if (counting() && fails_on(kRead, fd)) return -1;
    return next(fd, to, length, offset);
}

ssize_t write(int fd, const void* from, size_t length) {
    REAL(write);
    if (counting() && fails_on(kWrite, fd)) return -1;
    const ssize_t written = next(fd, from, length);
    if (block) note_on("write", fd);
    return written;
}

int rename(const char* from, const char* to) noexcept {
    REAL(rename);
    if (counting() && fails_at(kRename, AT_FDCWD, from)) return -1;
    const int result = next(from, to);
    if (!result && block) note_at("rename", AT_FDCWD, from, to);
    return result;
}

int fsync(int fd) {
    REAL(fsync);
    if (counting() && fails_on(kSync, fd)) return -1;
    const int result = next(fd);
    if (block) note_on("fsync", fd);
    return result;
}

int mkdir(const char* path, mode_t mode) noexcept {
    REAL(mkdir);
    if (counting() && fails_at(kMkdir, AT_FDCWD, path)) return -1;
    const int result = next(path, mode);
    if (!result && block) note_at("mkdir", AT_FDCWD, path);
    return result;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) noexcept {
    REAL(pthread_create);
    if (counting() && fails(kThread)) return block->error;
    return next(thread, how, run, with);
}

ssize_t send(int fd, const void* from, size_t length, int flags) {
    REAL(send);
    if (counting() && fails(kSend)) return -1;
    return next(fd, from, length, flags);
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
    REAL(sendmsg);
    if (counting() && fails(kSend)) return -1;
    return next(fd, message, flags);
}

int clock_gettime(clockid_t clock, timespec* at) noexcept {
    REAL(clock_gettime);
    const int result = next(clock, at);
    if (!result && block && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += block->clock_s;
    return result;
}

}  // extern "C"

// C++'s allocation, for all modules. Memory comes from malloc, as with libstdc++'s own, whose `delete` frees it.
void* operator new(size_t size) {
    if (void* memory = new_fails(__builtin_return_address(0), size) ? nullptr : malloc(size ? size : 1)) return memory;
    throw std::bad_alloc();
}

void* operator new[](size_t size) {
    if (void* memory = new_fails(__builtin_return_address(0), size) ? nullptr : malloc(size ? size : 1)) return memory;
    throw std::bad_alloc();
}

void* operator new(size_t size, std::align_val_t alignment) {
    const size_t whole = static_cast<size_t>(alignment), rounded = (size + whole - 1) / whole * whole;
    void* memory =
        new_fails(__builtin_return_address(0), size) ? nullptr : aligned_alloc(whole, rounded ? rounded : whole);
    if (memory) return memory;
    throw std::bad_alloc();
}
