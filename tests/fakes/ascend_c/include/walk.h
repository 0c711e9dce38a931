// One operand of a vector instruction: its place in the UB, and the strides by which repeats and blocks step through it.
#pragma once
#include "tensors.h"

namespace twin {

struct Walk {
    Slot* slot;
    uint32_t begin, bits;
    uint32_t block_stride = 1, repeat_stride = 8;
    const char* name;
    bool chains = false;  // whether a repeat may read what an earlier repeat wrote

    uint32_t block_lanes() const { return 256 / bits; }
    uint8_t* at(Core& core, uint32_t repeat, uint32_t lane) const {
        return core.ub + begin + repeat * repeat_stride * kBlock + lane / block_lanes() * block_stride * kBlock +
               lane % block_lanes() * bits / 8;
    }
    Region region(uint32_t lanes, uint32_t repeats) const {
        const uint32_t bytes = (uint64_t(lanes) * bits + 7) / 8;
        if (block_stride == 1 && repeat_stride * kBlock == bytes) return {slot, begin, bytes * repeats};
        return {slot, begin, bytes, block_stride, repeat_stride, repeats};
    }
};

template <class T>
Walk walk(const AscendC::LocalTensor<T>& tensor, const char* name, uint32_t block_stride = 1,
          uint32_t repeat_stride = 8, bool chains = false) {
    tensor.valid();
    return {tensor.slot, tensor.begin, bits_of<T>, block_stride, repeat_stride, name, chains};
}

}  // namespace twin
