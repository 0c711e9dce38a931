// LocalTensor and GlobalTensor: a range of the UB or of global memory, counted in elements.
//
// Scalar reads and writes of the UB run on the scalar pipe and need its flags. In global memory, scalar reads are
// allowed only of inputs, and scalar writes are not available: both go through a data cache that the twin does not
// have.
#pragma once
#include "core.h"

namespace AscendC {

template <class T> class LocalTensor {
public:
    using PrimType = T;
    LocalTensor() = default;
    LocalTensor(twin::Slot* slot_, uint32_t begin_, uint32_t size_) : slot(slot_), begin(begin_), size(size_) {}

    LocalTensor operator[](uint32_t offset) const {
        valid();
        if (offset >= size) twin::core().fail(twin::text("offset %u of a tensor of %u elements", offset, size));
        const uint64_t bits = uint64_t(offset) * twin::bits_of<T>;
        if (bits % 8) twin::core().fail("an int4b_t tensor is cut inside a byte");
        return {slot, uint32_t(begin + bits / 8), size - offset};
    }
    template <class U> LocalTensor<U> ReinterpretCast() const {
        return {slot, begin, uint32_t(uint64_t(size) * twin::bits_of<T> / twin::bits_of<U>)};
    }
    uint32_t GetSize() const { return size; }
    void SetSize(uint32_t size_) { size = size_; }

    T GetValue(uint32_t at) const {
        static const uint16_t op = twin::Shadow::op_id("GetValue");
        twin::Core& core = valid();
        core.begin(PIPE_S, op);
        core.read(PIPE_S, element(at), "the tensor");
        core.counts().scalar_ub += 1;
        T value;
        std::memcpy(&value, core.ub + element(at).begin, sizeof(T));
        return value;
    }
    T operator()(uint32_t at) const { return GetValue(at); }
    void SetValue(uint32_t at, T value) const {
        static const uint16_t op = twin::Shadow::op_id("SetValue");
        twin::Core& core = valid();
        core.begin(PIPE_S, op);
        core.write(PIPE_S, element(at), "the tensor");
        core.counts().scalar_ub += 1;
        std::memcpy(core.ub + element(at).begin, &value, sizeof(T));
    }

    twin::Core& valid() const {
        if (!slot) twin::core().fail("a LocalTensor is used that no queue or TBuf gave out");
        return twin::core();
    }
    twin::Slot* slot = nullptr;
    uint32_t begin = 0, size = 0;  // begin: byte in the UB; size: number of elements

private:
    twin::Region element(uint32_t at) const {
        static_assert(!std::is_same_v<T, int4b_t>, "scalar access to int4b_t");
        return {slot, uint32_t(begin + at * sizeof(T)), sizeof(T)};
    }
};

template <class T> class GlobalTensor {
public:
    using PrimType = T;
    void SetGlobalBuffer(__gm__ T* pointer_, uint64_t size_ = 0) { pointer = pointer_, size = size_; }
    GlobalTensor operator[](uint64_t offset) const {
        GlobalTensor at = *this;
        at.pointer = pointer + offset;
        return at;
    }
    const __gm__ T* GetPhyAddr() const { return pointer; }
    uint64_t GetSize() const { return size; }
    T GetValue(uint64_t at) const {
        static const uint16_t op = twin::Shadow::op_id("GetValue of global memory");
        twin::Core& core = twin::core();
        core.begin(PIPE_S, op);
        const auto* bytes = (const uint8_t*)(pointer + at);
        twin::Buffer& buffer = twin::run()->memory.find(core, pointer ? bytes : nullptr, sizeof(T), "a scalar read");
        if (buffer.role != twin::Role::INPUT)
            core.fail("scalar reads are for inputs only, their cache does not see what kernels write: " + buffer.name);
        buffer.read += sizeof(T);
        core.counts().scalar_gm += 1, core.counts().scalar_gm_bytes += sizeof(T);
        T value;
        std::memcpy(&value, bytes, sizeof(T));
        return value;
    }

    __gm__ T* pointer = nullptr;
    uint64_t size = 0;
};

}  // namespace AscendC
