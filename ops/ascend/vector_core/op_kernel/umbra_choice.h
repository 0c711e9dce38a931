// The choice of experts from the router's scores, by each core for itself:
//
//   scores (T, E) --Cast--> float [--> sigmoid + bias] --Sort32--> lists of 32 --MrgSort--> the best of each token
//                                                                                 --> ids: weights can be loaded
//   softmax or sigmoid of all scores --Gather--> of the chosen, / the sum of all, / the sum of the chosen --> weights
//
// Nothing can be loaded before the ids are known, so the sum and the quotients come after the first loads. A softmax
// need not be computed before the choice, since it keeps the order.
//
// Of equal scores the one with the smaller id comes first: Sort32 and MrgSort keep the order of equal ones. A row with a
// NaN has NaN as weights, since each is divided by the sum of all.
#pragma once
#include "umbra_pairs.h"

namespace umbra {

constexpr uint32_t kMostScored = 512;    // experts to choose from
constexpr uint32_t kMostChosen = 8;      // by a token
constexpr uint32_t kList = 32;           // scores that Sort32 sorts
constexpr uint32_t kPaired = 2 * kList;  // floats of a list: scores and payloads in turns. A payload is 4 * id
constexpr uint32_t kMerged = 4;          // most lists that MrgSort merges
constexpr uint32_t kMinusInfinity = 0xff800000u;

// Pairs of the experts that are chosen from scores (T, E), of type T or float. bias (E) float is added to sigmoids for the
// choice; it may be null.
template <typename T> class FromScores {
public:
    __aicore__ inline FromScores(Room& room, GM_ADDR scores, GM_ADDR bias, const UmbraGemvTiling& t)
        : room(room), scoresAt(scores), biasAt(bias), t(t), pitch(Up(t.scored, kList)), lists(pitch / kList),
          all(t.tokens * pitch) {
        score = room.sorting;
        biases = score[kMostRows * kMostScored];
        sorted = biases[kMostScored];
        merged = sorted[2 * kMostRows * kMostScored];
        best = merged[kMostRows * kMerged * kPaired];
        order = best[kMostRows * kPaired].ReinterpretCast<int32_t>();
        small = order[kMostScored].ReinterpretCast<float>();
        good = room.sums;
    }

    __aicore__ inline void Find(Chosen& chosen) {
        if (t.floatScores)
            Load<float>();
        else
            Load<T>();
        if (t.sigmoid) Sigmoid();
        for (uint32_t i = 0; i < t.tokens; ++i)
            AscendC::Sort32(sorted[i * pitch * 2], score[i * pitch], order.ReinterpretCast<uint32_t>(), lists);
        Barrier();
        const uint32_t groups = Ceil(lists, kMerged);
        if (groups > 1) {
            for (uint32_t i = 0; i < t.tokens; ++i)
                for (uint32_t g = 0; g < groups; ++g) {
                    const uint32_t from = lists * g / groups, to = lists * (g + 1) / groups;
                    Merge(merged[(i * groups + g) * kPaired], sorted[(i * lists + from) * kPaired], to - from);
                }
            Barrier();
        }
        if (lists > 1) {
            const LocalTensor<float> from = groups > 1 ? merged : sorted;
            const uint32_t count = groups > 1 ? groups : lists;
            for (uint32_t i = 0; i < t.tokens; ++i) Merge(best[i * kPaired], from[i * count * kPaired], count);
        } else {
            best = sorted;
        }
        Hand<HardEvent::V_S>(room.pipe);
        const LocalTensor<int32_t> ids = best.ReinterpretCast<int32_t>();
        for (uint32_t i = 0; i < t.tokens * t.topK; ++i)
            chosen.Take(i, ids.GetValue(i / t.topK * kPaired + i % t.topK * 2 + 1) / 4 - static_cast<int32_t>(t.first));
    }

    __aicore__ inline void Weigh(Weights& weights) {
        const LocalTensor<float> sums = small, blocks = small[64], parts = small[128], chosen = small[192];
        const LocalTensor<uint32_t> places = small[256].ReinterpretCast<uint32_t>();
        AscendC::Duplicate(small, 0.0f, 256);
        Barrier();
        if (!t.sigmoid) {
            AscendC::WholeReduceMax<float>(sums, best, 1, t.tokens, 1, 1, kPaired / 8,
                                           AscendC::ReduceOrder::ORDER_ONLY_VALUE);
            Barrier();
            AscendC::Brcb(blocks, sums, 1, {1, 8});
            Barrier();
            const uint32_t rest = pitch % kLanes, vectors = pitch - rest;
            for (uint32_t i = 0; i < t.tokens; ++i) {
                const uint32_t row = i * pitch, end = row + vectors;
                const LocalTensor<float> largest = blocks[i * 8];
                if (vectors)
                    AscendC::Sub(good[row], score[row], largest, kLanes, static_cast<uint8_t>(vectors / kLanes),
                                 {1, 1, 0, 8, 8, 0});
                if (rest) AscendC::Sub(good[end], score[end], largest, rest, 1, {1, 1, 0, 8, 8, 0});
            }
            Barrier();
            AscendC::Exp(good, good, all);
            Barrier();
        }
        uint32_t left = Ceil(pitch, kLanes);  // parts (left, 8): sums of a vector of each token
        for (uint32_t i = 0; i < left; ++i)
            AscendC::WholeReduceSum<float>(parts[i * 8], good[i * kLanes], Least(pitch - i * kLanes, kLanes), t.tokens,
                                           1, 1, pitch / 8);
        uint64_t count = 0;
        AscendC::GatherMask(places, best.ReinterpretCast<uint32_t>(), 2, true, 2 * kMostChosen,
                            {1, static_cast<uint16_t>(t.tokens), kPaired / 8, 0}, count);
        Barrier();
        for (uint32_t i = 0; i < t.tokens; ++i)
            AscendC::Gather(chosen[i * 8], good, places[i * 8], i * pitch * 4, kMostChosen);
        while (left > 1) {
            const uint32_t upper = left / 2;
            left -= upper;
            AscendC::Add(parts, parts, parts[left * 8], upper * 8);
            Barrier();
        }
        Divide(chosen, parts, blocks);
        AscendC::WholeReduceSum<float>(sums, chosen, t.topK, t.tokens, 1, 1, 1);
        Barrier();
        Divide(chosen, sums, blocks);
        Hand<HardEvent::V_S>(room.pipe);
        for (uint32_t i = 0; i < t.tokens * t.topK; ++i) weights.of[i] = chosen.GetValue(i / t.topK * 8 + i % t.topK);
        Hand<HardEvent::S_V>(room.pipe);
    }

private:
    Room& room;
    GM_ADDR scoresAt;
    GM_ADDR biasAt;
    const UmbraGemvTiling& t;
    const uint32_t pitch, lists, all;   // of a row of scores; lists of a row; floats of all rows
    LocalTensor<float> score, good;     // (T, pitch): what is sorted; softmax or sigmoid, not yet divided
    LocalTensor<float> biases;          // (pitch)
    LocalTensor<float> sorted, merged;  // lists
    LocalTensor<float> best;            // (T, kPaired): the best eight of each token come first
    LocalTensor<int32_t> order;         // (pitch): the payloads
    LocalTensor<float> small;

    template <typename V> static __aicore__ inline void Convert(const LocalTensor<float>& to,
                                                                const LocalTensor<V>& from, uint32_t count) {
        if constexpr (std::is_same<V, float>::value)
            AscendC::Adds(to, from, 0.0f, count);
        else
            AscendC::Cast(to, from, RoundMode::CAST_NONE, count);
    }

    // score = the scores, -infinity at the end of each row; biases likewise; order = 0, 4, 8, ..
    template <typename V> __aicore__ inline void Load() {
        const uint32_t bytes = t.scored * sizeof(V), row = Up(bytes, 32) / sizeof(V);
        GlobalTensor<V> from;
        GlobalTensor<float> biasFrom;
        from.SetGlobalBuffer(reinterpret_cast<__gm__ V*>(scoresAt));
        biasFrom.SetGlobalBuffer(reinterpret_cast<__gm__ float*>(biasAt));
        LocalTensor<V> in = room.stream.template AllocTensor<V>();
        AscendC::DataCopyPad(in, from, {static_cast<uint16_t>(t.tokens), bytes, 0, 0, 0},
                             AscendC::DataCopyPadExtParams<V>());
        LocalTensor<float> biasIn;
        if (biasAt) {
            biasIn = room.stream.template AllocTensor<float>();
            room.Fetch(biasIn, biasFrom, t.scored);
        }
        for (uint32_t i = 0; i < 8; ++i) order.SetValue(i, 4 * i);
        Hand<HardEvent::S_V>(room.pipe);
        AscendC::Duplicate(score.ReinterpretCast<uint32_t>(), kMinusInfinity, all);
        if (t.sigmoid) AscendC::Duplicate(biases.ReinterpretCast<uint32_t>(), kMinusInfinity, pitch);
        for (uint32_t have = 8; have < pitch; have *= 2) {
            AscendC::Adds(order[have], order, static_cast<int32_t>(4 * have), Least(have, pitch - have));
            Barrier();
        }
        if (t.sigmoid && !biasAt) AscendC::Duplicate(biases, 0.0f, t.scored);
        Hand<HardEvent::MTE2_V>(room.pipe);
        for (uint32_t i = 0; i < t.tokens; ++i) Convert(score[i * pitch], in[i * row], t.scored);
        if (biasAt) AscendC::Adds(biases, biasIn, 0.0f, t.scored);
        Barrier();
        room.stream.FreeTensor(in);
        if (biasAt) room.stream.FreeTensor(biasIn);
    }

    // good = 1 / (1 + exp(-score)), then score = good + biases.
    __aicore__ inline void Sigmoid() {
        AscendC::Muls(good, score, -1.0f, all);
        Barrier();
        AscendC::Exp(good, good, all);
        Barrier();
        AscendC::Adds(good, good, 1.0f, all);
        Barrier();
        const uint32_t rest = all % kLanes, vectors = all - rest;
        if (vectors)
            AscendC::Div(good, room.ones, good, kLanes, static_cast<uint8_t>(vectors / kLanes), {1, 1, 1, 8, 0, 8});
        if (rest) AscendC::Div(good[vectors], room.ones, good[vectors], rest, 1, {1, 1, 1, 8, 0, 8});
        Barrier();
        for (uint32_t i = 0; i < t.tokens; ++i) AscendC::Add(score[i * pitch], good[i * pitch], biases, pitch);
        Barrier();
    }

    // to = the best eight of each of `count` lists, in order.
    __aicore__ inline void Merge(const LocalTensor<float>& to, const LocalTensor<float>& from, uint32_t count) {
        uint16_t lengths[kMerged] = {};
        LocalTensor<float> list[kMerged];
        for (uint32_t i = 0; i < kMerged; ++i) {
            list[i] = from[i < count ? i * kPaired : 0];
            if (i < count) lengths[i] = kMostChosen;
        }
        AscendC::MrgSort(to, AscendC::MrgSortSrcList<float>(list[0], list[1], list[2], list[3]),
                         AscendC::MrgSort4Info(lengths, false, (1u << count) - 1, 1));
    }

    // of (T, 8) divided by a value for each token. `blocks` are overwritten.
    __aicore__ inline void Divide(const LocalTensor<float>& of, const LocalTensor<float>& by,
                                  const LocalTensor<float>& blocks) {
        AscendC::Brcb(blocks, by, 1, {1, 8});
        Barrier();
        AscendC::Div(of, of, blocks, t.tokens * 8);
        Barrier();
    }
};

}  // namespace umbra
