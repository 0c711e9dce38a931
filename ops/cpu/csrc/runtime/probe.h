// The limits that speeds are compared with: how fast all threads together read memory, and how many int8 multiply-adds
// they do on registers.
#pragma once

#include <cstdint>
#include "kernels/ops.h"
#include "runtime/buffer.h"

namespace umbra {

// Memory touched once by the pool, so that pages lie where their readers are.
class ReadProbe {
public:
    ReadProbe(Context& context, int64_t bytes);
    uint64_t run(Context& context) const;  // a value that depends on every byte, so nothing can be skipped

private:
    Buffer memory_;
    int64_t count_;  // of 8-byte words
    uint64_t* words() const { return reinterpret_cast<uint64_t*>(memory_.address()); }
};

// `rounds` times a fixed amount of independent int8 dot products on every thread; returns the multiply-adds done.
int64_t mac_probe(Context& context, int64_t rounds);

}  // namespace umbra
