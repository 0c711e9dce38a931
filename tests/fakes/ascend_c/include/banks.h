// Conflicts of an instruction's operands in the banks of the unified buffer (UB), by address.
//
// A block of 32 bytes is in bank group `address / 32 % 16`, and in the bank of that group in its third of the UB (64
// KB). In one cycle a group serves one read and one write, and a bank one of either; a repeat that asks for more takes
// as many cycles more. Rules and measured examples: asc-devkit, example bank_conflict_ub. In particular:
// - an operand's block is read once in a repeat if its block stride is 0, and once in all if its repeat stride is 0;
// - where the first blocks of the destination and of a source are in one bank, the write waits and costs nothing. Not
//   modelled: that a write which waits may then meet another source's read in its bank.
#pragma once
#include "walk.h"

namespace twin {

struct Banks {                // what one repeat reads, or writes
    uint64_t used = 0;        // a bit for each of the 48 banks
    uint32_t asked[16] = {};  // accesses to each group

    static uint32_t bank(uint32_t block) { return block / 2048 * 16 + block % 16; }
    static uint32_t first(const Walk& walk, uint32_t repeat) {
        return walk.begin / kBlock + repeat * walk.repeat_stride;
    }
    void add(const Walk& walk, uint32_t lanes, uint32_t repeat) {
        const uint32_t rows = walk.block_stride ? (lanes + walk.block_lanes() - 1) / walk.block_lanes() : 1;
        for (uint32_t row = 0; row < rows; ++row) {
            const uint32_t block = first(walk, repeat) + row * walk.block_stride;
            used |= uint64_t(1) << bank(block);
            ++asked[block % 16];
        }
    }
    uint32_t more() const { return std::max(*std::max_element(asked, asked + 16), 1u) - 1; }
};

// The cycles that an instruction takes for conflicts; `read` are the operands that it reads.
inline uint64_t bank_conflicts(const Walk& dst, const std::vector<Walk>& read, uint32_t lanes, uint32_t repeats) {
    uint64_t cycles = 0;
    for (uint32_t repeat = 0; repeat < repeats; ++repeat) {
        Banks reads, writes;
        writes.add(dst, lanes, repeat);
        bool apart = true;
        for (const Walk& walk : read) {
            if (repeat && !walk.repeat_stride) continue;
            reads.add(walk, lanes, repeat);
            apart &= Banks::bank(Banks::first(walk, repeat)) != Banks::bank(Banks::first(dst, repeat));
        }
        cycles += reads.more() + writes.more() + (apart && reads.used & writes.used);
    }
    return cycles;
}

}  // namespace twin
