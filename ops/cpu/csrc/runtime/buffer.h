// Memory for weights and caches: zeroed, on huge pages where the system allows them (fewer TLB misses: streaming runs 10
// to 50 % faster), with spare bytes after the end for kernels that prefetch ahead, on a NUMA node of choice. A file may be
// mapped in its place: it begins at a huge page, so that the system can map it in huge pages too.
#pragma once

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <new>
#include <string>
#include <vector>

#include "runtime/pool.h"

namespace umbra {

class Buffer {
public:
    // `memory` is a node's number, -1 for any. The node is preferred, not bound: if it is full the kernel takes the
    // next one, whereas bound memory that does not fit ends the process.
    explicit Buffer(int64_t bytes, int memory = -1) : Buffer(bytes, std::vector<int>{memory}) {}
    // The pages of memory of several nodes lie on them in turn.
    Buffer(int64_t bytes, const std::vector<int>& memory) : size_(bytes), bytes_(bytes + kHuge + kReadAhead) {
        memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory_ == MAP_FAILED) throw std::bad_alloc();
        madvise(memory_, bytes_, MADV_HUGEPAGE);  // a refusal costs speed only
        unsigned long mask[kMostCpus / 64] = {};
        for (int node : memory)
            if (node >= 0) local_ = true, mask[node / 64] |= 1ul << node % 64;
        const int policy = memory.size() == 1 ? MPOL_PREFERRED : MPOL_INTERLEAVE;
        bound_ = local_ && syscall(SYS_mbind, memory_, bytes_, policy, mask, kMostCpus, 0) == 0;
    }
    ~Buffer() { munmap(memory_, bytes_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    // Whether mbind succeeded. It fails where the call is missing (qemu-user) or forbidden (containers), or where there
    // is no such node.
    bool bound() const { return bound_; }

    // The fallback where mbind failed: threads of the pool's node `node` write every page first, which places it there.
    void touch(Pool& pool, int node) {
        constexpr int64_t kPage = 4096;
        const int64_t bytes = bytes_ - kHuge;  // after address()
        pool.on_nodes([&](int n) { return n == node ? static_cast<int>((bytes + kHuge - 1) / kHuge) : 0; },
                      [&](int, int begin, int end, int) {
                          auto* at = reinterpret_cast<volatile char*>(address());
                          for (int64_t i = begin * kHuge; i < std::min(bytes, end * kHuge); i += kPage) at[i] = 0;
                      });
    }

    // Whether the memory belongs on a certain node.
    bool local() const { return local_; }

    // Maps the first `bytes` bytes of a file over the beginning of the memory, read-only, with all its pages. A process
    // that writes there ends. Returns 0 or an error of errno, after which the memory is zeroed.
    int map(const std::string& path, int64_t bytes) {
        const File file(path, bytes);
        if (file.error) return file.error;
        void* at = reinterpret_cast<void*>(address());
        if (mmap(at, bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, file.fd, 0) != MAP_FAILED) {
            madvise(at, bytes, MADV_HUGEPAGE);  // if the file has yet to be read, it is read into huge pages
            if (madvise(at, bytes, kPopulateRead) == 0 || errno == EINVAL) return 0;  // kernels before 5.14 lack it
        }
        const int error = errno;
        renew();
        return error;
    }

    // Takes a mapped file away: zeroed memory again.
    void renew() {
        void* at = reinterpret_cast<void*>(address());
        if (mmap(at, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
            throw std::bad_alloc();
        madvise(at, size_, MADV_HUGEPAGE);
    }

    // Reads the first `bytes` bytes of a file on all threads of the pool. Returns 0 or an error of errno.
    int read(const std::string& path, int64_t bytes, Pool& pool) {
        const File file(path, bytes);
        std::atomic<int> error{file.error};
        const int64_t tasks = (bytes + kHuge - 1) / kHuge;
        if (!error)
            pool.each(static_cast<int>(tasks), [&](int task, int) {
                for (int64_t i = task * kHuge, end = std::min(bytes, i + kHuge); i < end && !error;) {
                    const ssize_t got = pread(file.fd, reinterpret_cast<char*>(address()) + i, end - i, i);
                    if (got > 0) i += got;
                    if (got == 0) error = ENODATA;
                    if (got < 0 && errno != EINTR) error = errno;
                }
            });
        return error;
    }

    int64_t size() const { return size_; }
    uintptr_t address() const { return (reinterpret_cast<uintptr_t>(memory_) + kHuge - 1) & ~uintptr_t{kHuge - 1}; }

private:
    struct File {
        int fd, error;
        File(const std::string& path, int64_t bytes) : fd(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
            struct stat facts;
            error = fd < 0 || fstat(fd, &facts) ? errno : facts.st_size < bytes ? ENODATA : 0;
        }
        ~File() { close(fd); }
    };

    static constexpr int64_t kHuge = 2 << 20, kReadAhead = 8192;
    static constexpr int kPopulateRead = 22;  // MADV_POPULATE_READ, which older headers lack
    int64_t size_, bytes_;                    // requested size; mapped size
    void* memory_;
    bool bound_ = false, local_ = false;
};

}  // namespace umbra
