// Memory for weights: zeroed, on huge pages where the system allows them (fewer TLB misses: streaming runs 10 to 50 %
// faster), with spare bytes after the end for kernels that prefetch ahead, on a NUMA node of choice.
#pragma once

#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <new>

#include "runtime/pool.h"

namespace umbra {

class Buffer {
public:
    // `memory` is a node's number, -1 for any. The node is preferred, not bound: if it is full the kernel takes the
    // next one, whereas bound memory that does not fit ends the process.
    explicit Buffer(int64_t bytes, int memory = -1) : size_(bytes), bytes_(bytes + kHuge + kReadAhead) {
        memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory_ == MAP_FAILED) throw std::bad_alloc();
        madvise(memory_, bytes_, MADV_HUGEPAGE);  // a refusal costs speed only
        if (memory < 0) return;
        unsigned long mask[kMostCpus / 64] = {};
        mask[memory / 64] = 1ul << memory % 64;
        bound_ = syscall(SYS_mbind, memory_, bytes_, MPOL_PREFERRED, mask, kMostCpus, 0) == 0;
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

    int64_t size() const { return size_; }
    uintptr_t address() const { return (reinterpret_cast<uintptr_t>(memory_) + kHuge - 1) & ~uintptr_t{kHuge - 1}; }

private:
    static constexpr int64_t kHuge = 2 << 20, kReadAhead = 8192;
    int64_t size_, bytes_;  // requested size; mapped size
    void* memory_;
    bool bound_ = false;
};

}  // namespace umbra
