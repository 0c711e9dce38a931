// The twin's record of one core's unified buffer (UB): which bytes are written, by which pipe last, and which pipes
// have read them since.
//
// Each pipe (S, V, MTE2, MTE3) numbers its instructions. known[p][q] is the last instruction of q that is sure to have
// ended before p's next one starts; flags, queues and barriers raise it. Two accesses to a block of 32 bytes, of which
// one is a write, must be ordered by it. This also holds for two accesses by the same pipe, except the scalar unit,
// which runs in order. Instructions that the scalar unit issues later come after everything that it has waited for.
// This is coarser than the hardware: accesses to different bytes of one block count as accesses to the same place.
#pragma once
#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

#include "counts.h"
#include "types.h"

namespace twin {

constexpr uint32_t kUbBytes = 192 * 1024, kBlock = 32;
constexpr uint32_t kUbUsable = kUbBytes - 256;  // the platform keeps the rest for itself
constexpr int kPipes = 4;                       // the first four of pipe_t
inline const char* pipe_name(int pipe) {
    static const char* names[] = {"S", "V", "MTE2", "MTE3", "ALL"};
    return names[pipe];
}

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline std::string text(const char* format, ...) {
    char line[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    return line;
}

// A piece of the UB that InitBuffer allocated: one buffer of a queue, or a TBuf.
struct Slot {
    enum State { FREE, ALLOCATED, ENQUEUED, DEQUEUED, GONE } state = FREE;  // GONE: freed by TPipe::Reset
    std::string name;
    uint32_t begin = 0, end = 0;  // bytes in the UB
    AscendC::TPosition position = AscendC::TPosition::VECCALC;
    int event = -1;              // the flag that guards it: of EnQue until DeQue, or of FreeTensor until AllocTensor
    bool tensor_buffer = false;  // whether it is a TBuf, which can always be used
};

// Bytes of the UB that one operand of an instruction touches: `bytes` from `begin` in blocks of 32, then again `repeats`
// times.
struct Region {
    const Slot* slot;
    uint32_t begin, bytes, block_stride = 1, repeat_stride = 0, repeats = 1;  // strides in blocks
};

using Ended = std::array<uint32_t, kPipes>;  // for each pipe, an instruction that has ended, with all before it

struct Block {
    uint32_t written = 0;  // a bit for each byte
    uint32_t write = 0;    // number of the last writing instruction
    uint32_t read[kPipes] = {};
    uint16_t write_op = 0;
    uint8_t write_pipe = 0;
};

struct Shadow {
    alignas(64) uint8_t ub[kUbBytes];
    Block blocks[kUbBytes / kBlock];
    uint32_t number[kPipes] = {};
    uint32_t known[kPipes][kPipes] = {};
    uint16_t op = 0;          // the instruction that runs, an index into op_names()
    int index = 0;            // index of the core
    std::vector<Ended> seen;  // of each core: what had ended at the last report of it that this core has waited for
    uint16_t sync_alls = 0;   // that this core has passed

    static std::vector<std::string>& op_names() {
        static std::vector<std::string> names{"start"};
        return names;
    }
    static uint16_t op_id(const std::string& name) {
        auto& names = op_names();
        const auto found = std::find(names.begin(), names.end(), name);
        if (found != names.end()) return found - names.begin();
        names.push_back(name);
        return names.size() - 1;
    }

    Shadow() { std::fill(ub, ub + kUbBytes, 0xff); }  // NaN in every float type

    [[noreturn]] void fail(const std::string& rule) const {
        throw Error(text("core %d, %s: %s", index, op_names()[op].c_str(), rule.c_str()));
    }

    // Begins the next instruction of a pipe.
    void begin(int pipe, uint16_t op_) {
        op = op_;
        ++number[pipe];
        if (pipe != PIPE_S)
            for (int other = PIPE_V; other < kPipes; ++other)
                known[pipe][other] = std::max(known[pipe][other], known[PIPE_S][other]);
        known[PIPE_S][PIPE_S] = number[PIPE_S];
    }

    void must_know(int pipe, int other, uint32_t instruction, const char* hazard, const Slot& slot, uint32_t block,
                   uint16_t other_op) const {
        if (instruction <= known[pipe][other]) return;
        const char* missing = pipe != other ? "no flag, queue or PipeBarrier<PIPE_ALL> orders them" : nullptr;
        fail(text("%s on %s, bytes %d..%d: %s runs after an unfinished %s (%s); %s", hazard, slot.name.c_str(),
                  int(block * kBlock) - int(slot.begin), int(block * kBlock) - int(slot.begin) + 31, pipe_name(pipe),
                  pipe_name(other), other_op ? op_names()[other_op].c_str() : "a read",
                  missing ? missing : text("no PipeBarrier<PIPE_%s> between them", pipe_name(pipe)).c_str()));
    }

    void read_block(int pipe, const Region& region, uint32_t index_, uint32_t mask, const char* operand) {
        Block& block = blocks[index_];
        if (block.write)
            must_know(pipe, block.write_pipe, block.write, "RAW hazard", *region.slot, index_, block.write_op);
        if (mask & ~block.written)
            fail(text("reads bytes never written: %s in %s, byte %d", operand, region.slot->name.c_str(),
                      int(index_ * kBlock) - int(region.slot->begin) + __builtin_ctz(mask & ~block.written)));
        block.read[pipe] = number[pipe];
    }
    void write_block(int pipe, const Region& region, uint32_t index_, uint32_t mask) {
        Block& block = blocks[index_];
        for (int other = 0; other < kPipes; ++other)
            if (!(other == pipe && block.read[other] == number[pipe]))
                must_know(pipe, other, block.read[other], "WAR hazard", *region.slot, index_, 0);
        if (block.write && !(block.write_pipe == pipe && block.write == number[pipe]))
            must_know(pipe, block.write_pipe, block.write, "WAW hazard", *region.slot, index_, block.write_op);
        block.written |= mask;
        block.write = number[pipe], block.write_pipe = pipe, block.write_op = op;
    }

    void check(const Region& region, const char* operand) const {
        const Slot& slot = *region.slot;
        if (slot.state == Slot::GONE) fail(text("%s in %s is used after TPipe::Reset", operand, slot.name.c_str()));
        if (!slot.tensor_buffer && slot.state == Slot::FREE)
            fail(text("%s in %s is used after FreeTensor", operand, slot.name.c_str()));
        if (!slot.tensor_buffer && slot.state == Slot::ENQUEUED)
            fail(text("%s in %s is used between EnQue and DeQue", operand, slot.name.c_str()));
        if (!region.bytes) return;
        const uint32_t rows = (region.bytes - 1) / kBlock;
        const uint64_t last = region.begin + uint64_t(region.repeats - 1) * region.repeat_stride * kBlock +
                              uint64_t(rows) * region.block_stride * kBlock +
                              (region.block_stride ? (region.bytes - 1) % kBlock : std::min(region.bytes, kBlock) - 1);
        if (last >= slot.end)
            fail(text("%s is outside its buffer %s: reaches byte %d of %u", operand, slot.name.c_str(),
                      int(last - slot.begin) + 1, slot.end - slot.begin));
    }

    // Checks and records a read or a write of all of a region. The address need not be that of a block's first byte.
    template <bool is_write> void touch(int pipe, Region region, const char* operand) {
        check(region, operand);
        if (!region.bytes) return;
        if (!region.repeat_stride) region.repeats = 1;  // the same bytes each time
        const uint32_t bytes = region.block_stride ? region.bytes : std::min(region.bytes, kBlock);
        auto one = [&](uint32_t block, uint32_t mask) {
            if constexpr (is_write)
                write_block(pipe, region, block, mask);
            else
                read_block(pipe, region, block, mask, operand);
        };
        for (uint32_t repeat = 0; repeat < region.repeats; ++repeat) {
            const uint32_t start = region.begin + repeat * region.repeat_stride * kBlock;
            const uint32_t shift = start % kBlock;  // not 0 only for contiguous regions
            uint32_t block = start / kBlock, left = bytes;
            if (shift) {
                const uint32_t first = std::min(left, kBlock - shift);
                one(block++, ((1u << first) - 1) << shift), left -= first;  // first < 32
            }
            for (; left >= kBlock; left -= kBlock, block += region.block_stride) one(block, ~0u);
            if (left) one(block, (1u << left) - 1);
        }
    }
    void read(int pipe, const Region& region, const char* operand) { touch<false>(pipe, region, operand); }
    void write(int pipe, const Region& region, const char* operand) { touch<true>(pipe, region, operand); }
    void forget(uint32_t begin_, uint32_t end) {  // the bytes have no defined contents from now on
        for (uint32_t byte = begin_; byte < end; ++byte) blocks[byte / kBlock].written &= ~(1u << byte % kBlock);
        std::fill(ub + begin_, ub + end, 0xff);
    }

    // For each pipe, the last instruction that is sure to have ended when `pipe` gets to what is issued next.
    Ended ended_before(int pipe) const {
        Ended ended;
        for (int other = 0; other < kPipes; ++other)
            ended[other] = std::max(known[pipe][other], other == PIPE_S ? 0 : known[PIPE_S][other]);
        ended[pipe] = number[pipe];
        return ended;
    }

    // The number of a pipe's instructions for whose end no other pipe has waited.
    uint32_t under_way(int pipe) const {
        uint32_t ended = 0;
        for (int other = 0; other < kPipes; ++other) ended = std::max(ended, known[other][pipe]);
        return number[pipe] - ended;
    }

    void barrier(int pipe) {
        if (pipe == PIPE_ALL) {
            for (auto& row : known) std::copy(number, number + kPipes, row);
        } else {
            known[pipe][pipe] = number[pipe];
        }
    }
};

}  // namespace twin
