// Counts of a core's work between two waits for all cores, the input of the cycle model.
//
// Counts are not times: overlap of pipes, caches and instruction fetch are not modelled.
#pragma once
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace twin {

struct Moves {
    uint64_t count = 0, bytes = 0, bursts = 0;
    std::map<uint32_t, uint64_t> by_move, by_burst;  // bytes of a move, of a contiguous piece in global memory -> count
    void add(uint32_t pieces, uint32_t piece_bytes) {
        count += 1, bytes += uint64_t(pieces) * piece_bytes, bursts += pieces;
        by_move[pieces * piece_bytes] += 1, by_burst[piece_bytes] += pieces;
    }
};

struct Instructions {
    uint64_t count = 0, repeats = 0, conflicts = 0;  // conflicts: cycles, see banks.h
};

struct Counts {
    Moves in, out;  // moves of MTE2 and of MTE3
    std::map<std::string, Instructions> vector;
    std::map<std::string, uint64_t> barriers;
    uint64_t flags = 0, scalar_ub = 0, scalar_gm = 0, scalar_gm_bytes = 0;
    uint64_t ahead = 0;  // loads that were under way when the wait before it was reached
};

template <class Map> std::string histogram_json(const Map& map) {
    std::string text = "{";
    for (auto& [key, value] : map) {
        if constexpr (std::is_same_v<std::decay_t<decltype(key)>, std::string>)
            text += "\"" + key + "\": " + std::to_string(value) + ", ";
        else
            text += "\"" + std::to_string(key) + "\": " + std::to_string(value) + ", ";
    }
    return (text.size() > 1 ? text.substr(0, text.size() - 2) : text) + "}";
}

inline std::string moves_json(const Moves& moves) {
    return "{\"count\": " + std::to_string(moves.count) + ", \"bytes\": " + std::to_string(moves.bytes) +
           ", \"bursts\": " + std::to_string(moves.bursts) + ", \"by_move\": " + histogram_json(moves.by_move) +
           ", \"by_burst\": " + histogram_json(moves.by_burst) + "}";
}

inline std::string counts_json(const Counts& counts) {
    std::map<std::string, uint64_t> instructions, repeats, conflicts;
    for (auto& [op, done] : counts.vector) {
        instructions[op] = done.count, repeats[op] = done.repeats;
        if (done.conflicts) conflicts[op] = done.conflicts;
    }
    return "{\"mte2\": " + moves_json(counts.in) + ", \"mte3\": " + moves_json(counts.out) +
           ", \"instructions\": " + histogram_json(instructions) + ", \"repeats\": " + histogram_json(repeats) +
           ", \"conflicts\": " + histogram_json(conflicts) + ", \"ahead\": " + std::to_string(counts.ahead) +
           ", \"barriers\": " + histogram_json(counts.barriers) + ", \"flags\": " + std::to_string(counts.flags) +
           ", \"scalar_ub\": " + std::to_string(counts.scalar_ub) +
           ", \"scalar_gm\": " + std::to_string(counts.scalar_gm) +
           ", \"scalar_gm_bytes\": " + std::to_string(counts.scalar_gm_bytes) + "}";
}

}  // namespace twin
