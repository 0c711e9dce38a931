// Instructions whose operands are at given addresses of the UB, for the counts of bank conflicts. The kernels add_1 to
// add_8 are the scenarios of asc-devkit's example bank_conflict_ub, each with one Add of 64 repeats.
#include "kernel_operator.h"

using namespace AscendC;

struct Buffer {  // all of the UB, filled with ones
    Buffer() {
        pipe.InitBuffer(buffer, twin::kUbUsable);
        all = buffer.Get<float>();
        Duplicate(all, 1.0f, twin::kUbUsable / 4);
        PipeBarrier<PIPE_V>();
    }
    LocalTensor<float> at(uint32_t address) const { return all[address / 4]; }

    TPipe pipe;
    TBuf<TPosition::VECCALC> buffer;
    LocalTensor<float> all;
};

#define ADD(number, src0, src1, dst, ...)                                                  \
    extern "C" __global__ __aicore__ void add_##number(GM_ADDR, GM_ADDR) {                 \
        Buffer ub;                                                                         \
        Add(ub.at(dst), ub.at(src0), ub.at(src1), 64, 64, BinaryRepeatParams __VA_ARGS__); \
    }
ADD(1, 0, 0x10100, 0x20000, (1, 1, 1, 8, 8, 8))
ADD(2, 0, 0x4000, 0x10000, (1, 1, 1, 8, 8, 8))
ADD(3, 0, 0x10000, 0x14100, (1, 1, 1, 8, 8, 8))
ADD(4, 0, 0x10100, 0x4000, (1, 1, 1, 8, 8, 8))
ADD(5, 0, 0x10100, 0x4020, (1, 1, 1, 8, 8, 8))
ADD(6, 0, 0x10100, 0x10100, (1, 1, 1, 8, 8, 8))
ADD(7, 0, 0x10100, 0x10100, (1, 0, 1, 8, 1, 8))
ADD(8, 0, 0x10100, 0x10100, (1, 0, 1, 8, 8, 8))

extern "C" __global__ __aicore__ void blocks_16_apart(GM_ADDR, GM_ADDR) {
    Buffer ub;
    Muls(ub.at(0x10000), ub.at(0), 2.0f, 64, 1, {16, 1, 8, 8});
}
extern "C" __global__ __aicore__ void blocks_8_apart(GM_ADDR, GM_ADDR) {
    Buffer ub;
    Muls(ub.at(0x10000), ub.at(0), 2.0f, 64, 1, {8, 1, 8, 8});
}
extern "C" __global__ __aicore__ void read_once(GM_ADDR, GM_ADDR) {  // src0 is read in the first repeat alone
    Buffer ub;
    Add(ub.at(0x20000), ub.at(0), ub.at(0x4000), 64, 64, {1, 1, 1, 8, 0, 8});
}
extern "C" __global__ __aicore__ void three_reads(GM_ADDR, GM_ADDR) {  // a number of elements: the last repeat is short
    Buffer ub;
    MulAddDst(ub.at(0x20000), ub.at(0), ub.at(0x10000), 300);
}
extern "C" __global__ __aicore__ void other_thirds(GM_ADDR, GM_ADDR) {  // the same groups, but other banks
    Buffer ub;
    Add(ub.at(0x10020), ub.at(0), ub.at(0x20100), 64, 64, {1, 1, 1, 8, 8, 8});
}
extern "C" __global__ __aicore__ void widened(GM_ADDR, GM_ADDR) {  // 128 bytes of halves and 256 of floats a repeat
    Buffer ub;
    MulAddDst(ub.at(0x20000), ub.at(0).ReinterpretCast<half>(), ub.at(0x10080).ReinterpretCast<half>(), 256);
}

// Two instructions of the seed's kernel at their addresses: half sums += a row * x, and float sums += half sums * scales.
extern "C" __global__ __aicore__ void seed_axpy(GM_ADDR, GM_ADDR) {
    Buffer ub;
    Axpy(ub.at(90368).ReinterpretCast<half>(), ub.at(107008).ReinterpretCast<half>(), half(1), 1536);
}
extern "C" __global__ __aicore__ void seed_scale(GM_ADDR, GM_ADDR) {
    Buffer ub;
    MulAddDst(ub.at(82176), ub.at(107008), ub.at(115200), 1536);
}
