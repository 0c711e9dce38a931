// TPipe, TQue, TBuf: buffers of the UB, and the flags that order their use by different pipes.
//
// A queue's EnQue sets a flag from the pipe that fills a buffer (VECIN: MTE2, VECOUT: V) to the pipe that empties it
// (V, MTE3), and DeQue waits for the flag. FreeTensor and the next AllocTensor do the same in the other direction. Each
// flag takes one of 8 event ids. Not modelled: TQueBind, TBufPool, queues at VECCALC, in-place and const tensors,
// several TPipes at a time.
#pragma once
#include "tensors.h"

namespace AscendC {

class TPipe {
public:
    TPipe() {
        if (twin::core().pipe) twin::core().fail("a second TPipe while the first one lives");
        twin::core().pipe = this;
    }
    TPipe(const TPipe&) = delete;
    ~TPipe() { twin::core().pipe = nullptr; }

    template <class Q> bool InitBuffer(Q& queue, uint8_t number, uint32_t length) {
        if (!number || (queue.slots.size() && queue.slots[0]->state != twin::Slot::GONE))
            twin::core().fail(number ? "InitBuffer of the same queue twice" : "InitBuffer with no buffers");
        ++queues;
        queue.slots.clear();
        for (int buffer = 0; buffer < number; ++buffer)
            queue.slots.push_back(take(length, Q::position,
                                       twin::text("queue %d (%s) buffer %d", queues,
                                                  Q::position == TPosition::VECIN ? "VECIN" : "VECOUT", buffer)));
        return true;
    }
    template <class B> auto InitBuffer(B& buffer, uint32_t length) -> decltype(buffer.slot, true) {
        ++buffers;
        buffer.slot = take(length, B::position, twin::text("TBuf %d", buffers));
        buffer.slot->tensor_buffer = true;
        return true;
    }
    // Frees all of the UB; the queues' buffers must be free.
    void Reset() {
        release_all();
        for (twin::Slot& slot : twin::core().slots) slot.state = twin::Slot::GONE;
        used = 0;
    }

    TEventID FetchEventID(HardEvent event) const {
        for (int id = 0; id < 8; ++id)
            if (!twin::flag_of(event, id).taken) return id;
        twin::core().fail(twin::text("all 8 event ids of %s are taken", twin::event_name(event).c_str()));
    }
    template <HardEvent event> TEventID FetchEventID() const { return FetchEventID(event); }
    template <HardEvent event> TEventID AllocEventID() const { return twin::take_event(event); }
    template <HardEvent event> void ReleaseEventID(TEventID id) const { twin::flag_of(event, id).taken = false; }

    // To be called at the end and at Reset: no buffer may be in use; waits for the flags of freed buffers.
    static void release_all();

private:
    twin::Slot* take(uint32_t length, TPosition position, const std::string& name) {
        const uint32_t bytes = (length + 31) / 32 * 32;
        if (!length) twin::core().fail("InitBuffer of 0 bytes for " + name);
        if (used + bytes > twin::kUbUsable)
            twin::core().fail(
                twin::text("InitBuffer: %u bytes for %s after %u make more than the %u that a kernel may use", bytes,
                           name.c_str(), used, twin::kUbUsable));
        if (std::count_if(twin::core().slots.begin(), twin::core().slots.end(),
                          [](const twin::Slot& slot) { return slot.state != twin::Slot::GONE; }) == 64)
            twin::core().fail("InitBuffer: a kernel may have 64 buffers at most");
        twin::core().slots.push_back({twin::Slot::FREE, name, used, used + bytes, position, -1, false});
        used += bytes;
        return &twin::core().slots.back();
    }
    uint32_t used = 0;
    int queues = 0, buffers = 0;
};

inline TPipe* GetTPipePtr() { return twin::core().pipe; }

template <TPosition where, int32_t depth, auto = 0> class TQue {
public:
    static_assert(where == TPosition::VECIN || where == TPosition::VECOUT, "queues are at VECIN or VECOUT");
    static_assert(depth > 0, "a queue's depth must be positive");
    TQue() {}
    ~TQue() {}
    static constexpr TPosition position = where;
    static constexpr HardEvent filled = where == TPosition::VECIN ? HardEvent::MTE2_V : HardEvent::V_MTE3;
    static constexpr HardEvent emptied = where == TPosition::VECIN ? HardEvent::V_MTE2 : HardEvent::MTE3_V;

    template <class T> LocalTensor<T> AllocTensor() {
        twin::Core& core = twin::core();
        if (slots.empty()) core.fail("AllocTensor of a queue without InitBuffer");
        const auto out = std::count_if(core.slots.begin(), core.slots.end(), [](const twin::Slot& slot) {
            return !slot.tensor_buffer && slot.position == where && slot.state != twin::Slot::FREE &&
                   slot.state != twin::Slot::GONE;
        });
        if (out == 8) core.fail("AllocTensor: more than 8 tensors of the queues at one position are out");
        for (size_t tried = 0; tried < slots.size(); ++tried) {
            twin::Slot* slot = slots[next];
            next = (next + 1) % slots.size();
            if (slot->state != twin::Slot::FREE) continue;
            if (slot->event >= 0) pass(emptied, *slot);
            slot->state = twin::Slot::ALLOCATED;
            return {slot, slot->begin, uint32_t((slot->end - slot->begin) * 8 / twin::bits_of<T>)};
        }
        core.fail(twin::text("AllocTensor: all %zu buffers of the queue of %s are out", slots.size(),
                             slots[0]->name.c_str()));
    }
    template <class T> bool EnQue(const LocalTensor<T>& tensor) {
        twin::Slot& slot = own(tensor, "EnQue");
        if (slot.state != twin::Slot::ALLOCATED) twin::core().fail("EnQue without AllocTensor: " + slot.name);
        if (waiting.size() == size_t(depth))
            twin::core().fail(
                twin::text("EnQue: the queue of %s already holds its depth, %d", slot.name.c_str(), depth));
        slot.event = twin::take_event(filled);
        twin::set_flag(filled, slot.event);
        slot.state = twin::Slot::ENQUEUED;
        waiting.push_back(&slot);
        return true;
    }
    template <class T> LocalTensor<T> DeQue() {
        if (waiting.empty()) twin::core().fail("DeQue of an empty queue");
        twin::Slot& slot = *waiting.front();
        waiting.pop_front();
        pass(filled, slot);
        slot.state = twin::Slot::DEQUEUED;
        return {&slot, slot.begin, uint32_t((slot.end - slot.begin) * 8 / twin::bits_of<T>)};
    }
    template <class T> void FreeTensor(LocalTensor<T>& tensor) {
        twin::Slot& slot = own(tensor, "FreeTensor");
        if (slot.state == twin::Slot::FREE || slot.state == twin::Slot::ENQUEUED)
            twin::core().fail(twin::text("FreeTensor of %s, which %s", slot.name.c_str(),
                                         slot.state == twin::Slot::FREE ? "is free" : "waits in the queue"));
        slot.state = twin::Slot::FREE;
        slot.event = twin::take_event(emptied);
        twin::set_flag(emptied, slot.event);
    }

    std::vector<twin::Slot*> slots;

private:
    static void pass(HardEvent event, twin::Slot& slot) {
        twin::wait_flag(event, slot.event);
        twin::flag_of(event, slot.event).taken = false;
        slot.event = -1;
    }
    template <class T> twin::Slot& own(const LocalTensor<T>& tensor, const char* what) {
        for (twin::Slot* slot : slots)
            if (slot == tensor.slot) return *slot;
        twin::core().fail(twin::text("%s of a tensor that is not this queue's", what));
    }
    std::deque<twin::Slot*> waiting;
    size_t next = 0;
};

inline void TPipe::release_all() {
    twin::Core& core = twin::core();
    for (twin::Slot& slot : core.slots) {
        if (slot.tensor_buffer || slot.state == twin::Slot::GONE) continue;
        if (slot.state != twin::Slot::FREE) core.fail(slot.name + " was not freed");
        if (slot.event < 0) continue;
        const HardEvent emptied = slot.position == TPosition::VECIN ? HardEvent::V_MTE2 : HardEvent::MTE3_V;
        twin::wait_flag(emptied, slot.event);
        twin::flag_of(emptied, slot.event).taken = false;
        slot.event = -1;
    }
}

template <TPosition where> class TBuf {
public:
    static constexpr TPosition position = where;
    template <class T> LocalTensor<T> Get() const {
        if (!slot) twin::core().fail("Get of a TBuf without InitBuffer");
        return {slot, slot->begin, uint32_t((slot->end - slot->begin) * 8 / twin::bits_of<T>)};
    }
    template <class T> LocalTensor<T> Get(uint32_t count) const {
        LocalTensor<T> tensor = Get<T>();
        if (count > tensor.size)
            twin::core().fail(twin::text("Get(%u) of %s, which has %u", count, slot->name.c_str(), tensor.size));
        tensor.size = count;
        return tensor;
    }
    twin::Slot* slot = nullptr;
};

}  // namespace AscendC
