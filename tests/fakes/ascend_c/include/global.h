// Global memory: the buffers that a kernel was given, and for each byte the cores that wrote and read it, and in which
// of their instructions.
//
// A core may read or overwrite what another core wrote only if it has waited for a report (SyncAll, cross-core flag)
// that the other core made after the write had ended, and likewise overwrite what another core read. Of bytes that
// several cores have read only the SyncAlls are known. One core's own moves must be ordered as in the UB. Bytes are checked one by one, so cores may write neighbouring bytes. Not
// modelled: caches (so scalar reads of bytes that kernels write are refused), alignment of the buffers themselves.
#pragma once
#include <cstdlib>
#include <memory>

#include "shadow.h"

namespace twin {

enum class Role { INPUT, OUTPUT, WORKSPACE };

struct Cell {
    uint16_t write_core;             // core + 1; 0: never written
    uint16_t read_core, read_phase;  // core + 1; kSeveral: more than one; the SyncAlls that the reader had passed
    uint32_t write, read;            // numbers of the instructions
};

struct Buffer {
    static constexpr uint16_t kSeveral = 0xffff;
    std::string name;
    Role role;
    uint8_t* base;
    uint64_t size;
    std::unique_ptr<Cell[], decltype(&std::free)> cells{nullptr, &std::free};  // pages are allocated at first access
    uint64_t read = 0, written = 0;

    Buffer(std::string name_, Role role_, uint8_t* base_, uint64_t size_)
        : name(std::move(name_)), role(role_), base(base_), size(size_) {
        if (role != Role::INPUT) cells.reset(static_cast<Cell*>(std::calloc(size, sizeof(Cell))));
    }
};

struct GlobalMemory {
    std::vector<Buffer> buffers;

    Buffer& find(const Shadow& core, const uint8_t* pointer, uint64_t bytes, const char* what) {
        const auto address = reinterpret_cast<uintptr_t>(pointer);
        const Buffer* nearest = nullptr;
        for (Buffer& buffer : buffers) {
            const auto base = reinterpret_cast<uintptr_t>(buffer.base);
            if (address >= base && address + bytes <= base + buffer.size) return buffer;
            if (address >= base && (!nearest || base > reinterpret_cast<uintptr_t>(nearest->base))) nearest = &buffer;
        }
        if (!pointer || !nearest)
            core.fail(text("%s %s", what, pointer ? "outside every buffer" : "of an absent (null) buffer"));
        const int64_t offset = pointer - nearest->base;
        core.fail(text("%s outside global memory: bytes %lld..%lld of %s, which has %lld", what, (long long)offset,
                       (long long)(offset + bytes), nearest->name.c_str(), (long long)nearest->size));
    }

    void check_read(Shadow& core, Buffer& buffer, const uint8_t* pointer, uint64_t bytes) {
        if (buffer.role == Role::INPUT) return;
        const uint16_t me = core.index + 1;
        for (uint64_t at = pointer - buffer.base, end = at + bytes; at < end; ++at) {
            Cell& cell = buffer.cells[at];
            auto where = [&] { return text("%s, byte %llu", buffer.name.c_str(), (unsigned long long)at); };
            if (!cell.write_core) core.fail("reads global bytes never written: " + where());
            if (cell.write_core != me && cell.write > core.seen[cell.write_core - 1][PIPE_MTE3])
                core.fail(text("reads what core %d wrote without a SyncAll or flag between: %s", cell.write_core - 1,
                               where().c_str()));
            if (cell.write_core == me && cell.write > core.known[PIPE_MTE2][PIPE_MTE3])
                core.fail("RAW hazard in global memory, no MTE3_MTE2 flag after the write: " + where());
            const bool shared = cell.read_core && cell.read_phase == core.sync_alls && cell.read_core != me;
            cell.read_core = shared ? Buffer::kSeveral : me;
            cell.read_phase = core.sync_alls, cell.read = core.number[PIPE_MTE2];
        }
    }

    void check_write(Shadow& core, Buffer& buffer, const uint8_t* pointer, uint64_t bytes) {
        if (buffer.role == Role::INPUT) core.fail("writes into the input " + buffer.name);
        const uint16_t me = core.index + 1;
        for (uint64_t at = pointer - buffer.base, end = at + bytes; at < end; ++at) {
            Cell& cell = buffer.cells[at];
            auto where = [&] { return text("%s, byte %llu", buffer.name.c_str(), (unsigned long long)at); };
            if (cell.write_core && cell.write_core != me && cell.write > core.seen[cell.write_core - 1][PIPE_MTE3])
                core.fail(text("writes what core %d wrote without a SyncAll or flag between: %s", cell.write_core - 1,
                               where().c_str()));
            const bool unseen = cell.read_core == Buffer::kSeveral
                                    ? cell.read_phase == core.sync_alls
                                    : cell.read_core && cell.read > core.seen[cell.read_core - 1][PIPE_MTE2];
            if (cell.read_core != me && unseen)
                core.fail("writes what another core read without a SyncAll or flag between: " + where());
            const uint32_t* known = core.known[PIPE_MTE3];
            if (cell.read_core == me && cell.read > known[PIPE_MTE2])
                core.fail("WAR hazard in global memory, no MTE2_MTE3 flag after the read: " + where());
            if (cell.write_core == me && cell.write != core.number[PIPE_MTE3] && cell.write > known[PIPE_MTE3])
                core.fail("WAW hazard in global memory, no PipeBarrier<PIPE_MTE3> between: " + where());
            cell.write_core = me, cell.write = core.number[PIPE_MTE3];
        }
    }
};

}  // namespace twin
