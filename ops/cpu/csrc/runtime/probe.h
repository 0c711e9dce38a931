// The hardware limits that speeds are compared with: how fast all threads together read memory, and how many int8
// multiply-adds they do on registers.
#pragma once

#include <cstdint>
#include "kernels/ops.h"
#include "runtime/buffer.h"

namespace umbra {

// Memory that the pool wrote first, so that each page lies near its reader.
class ReadProbe {
public:
    ReadProbe(Context& context, int64_t bytes);
    // Returns a value that depends on every byte, so that no read can be optimised away.
    uint64_t run(Context& context) const;

private:
    Buffer memory_;
    int64_t count_;  // of 8-byte words
    uint64_t* words() const { return reinterpret_cast<uint64_t*>(memory_.address()); }
};

// Runs `rounds` times a fixed number of independent int8 dot products on every thread; returns the multiply-adds done.
int64_t mac_probe(Context& context, int64_t rounds);

}  // namespace umbra
