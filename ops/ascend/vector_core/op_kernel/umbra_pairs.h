// Pairs of a token and an expert, and their weights, as a kernel is given them.
#pragma once
#include "umbra_plan.h"

namespace umbra {

struct Weights {
    float of[kMostPairs];
};

// ids (pairs) int32 and weights (pairs) of type T in global memory.
template <typename T> class FromMemory {
public:
    __aicore__ inline FromMemory(Room& room, GM_ADDR ids, GM_ADDR weights, const UmbraGemvTiling& t)
        : room(room), pairs(t.tokens * t.topK) {
        idsAt.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(ids));
        weightsAt.SetGlobalBuffer(reinterpret_cast<__gm__ T*>(weights));
    }

    __aicore__ inline void Find(Chosen& chosen) { room.ReadScalars(idsAt, pairs, chosen); }

    __aicore__ inline void Weigh(Weights& weights) {
        LocalTensor<T> in = room.stream.template AllocTensor<T>();
        room.Fetch(in, weightsAt, pairs);
        Hand<HardEvent::MTE2_V>(room.pipe);
        AscendC::Cast(room.sums, in, RoundMode::CAST_NONE, pairs);
        room.stream.FreeTensor(in);
        Hand<HardEvent::V_S>(room.pipe);
        for (uint32_t i = 0; i < pairs; ++i) weights.of[i] = room.sums.GetValue(i);
        Hand<HardEvent::S_V>(room.pipe);
    }

private:
    Room& room;
    const uint32_t pairs;
    GlobalTensor<int32_t> idsAt;
    GlobalTensor<T> weightsAt;
};

}  // namespace umbra
