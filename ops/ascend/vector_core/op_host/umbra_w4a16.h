// Host code that the ops share: reading and checking shapes, sizing the workspace, filling the tiling struct.
//
// The code is C++11, because CANN's code generator compiles it as that.
// Inputs are found by their index in the op's definition (the GetOptional* calls); the index among the inputs that are
// present would shift when zero points are absent.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "tiling/platform/platform_ascendc.h"
#include "umbra_gemv_tiling.h"
#include "umbra_planes.h"
#include "umbra_signatures.h"

namespace umbra {

constexpr uint64_t kHalf = 1, kBfloat16 = 2;  // tiling keys
constexpr uint64_t kFloatSums = 2;            // added to the tiling key
constexpr int64_t kMostSize = 1 << 30;        // of a dimension: products of two, and sums of a few, do not overflow
constexpr uint32_t kAllCoresAtOnce = 1;       // schedule mode: kernels wait for each other's cores (SyncAll)

// The sizes in the tiling struct; for a mixture n is I.
struct Problem {
    int64_t tokens, topK, experts, k, n;
    bool zeros, pairs, tiles;
    Planes first, second;
};

// First bytes of the parts after w13 in an expert's block in an arena.
struct Block {
    int64_t s13, z13, w2, s2, z2;
};

// How a kernel chooses experts from scores (T, scored).
struct Scoring {
    int64_t scored, first;
    bool sigmoid, floats;
};

template <class Context> bool fail(const Context* context, const char* rule, int64_t found) {
    std::fprintf(stderr, "[ERROR] %s: %s (found %lld)\n", context->GetNodeType(), rule, static_cast<long long>(found));
    return false;
}

// An input's shape by its index in the op's definition; null if it is absent.
inline const gert::Shape* shape_at(const gert::TilingContext* context, size_t place) {
    const gert::StorageShape* shape = context->GetOptionalInputShape(place);
    return shape ? &shape->GetStorageShape() : nullptr;
}
inline const gert::Shape* shape_at(const gert::InferShapeContext* context, size_t place) {
    return context->GetOptionalInputShape(place);
}

template <class Context> bool has_rank(const Context* context, size_t place, size_t rank) {
    const gert::Shape* shape = shape_at(context, place);
    const int64_t found = shape ? static_cast<int64_t>(shape->GetDimNum()) : -1;
    if (found != static_cast<int64_t>(rank)) {
        std::fprintf(stderr, "[ERROR] %s: input %zu must have %zu dimensions (found %lld)\n", context->GetNodeType(),
                     place, rank, static_cast<long long>(found));
        return false;
    }
    for (size_t at = 0; at < rank && rank > 1; ++at)  // an arena may be longer
        if (shape->GetDim(at) < 0 || shape->GetDim(at) > kMostSize)
            return fail(context, "a dimension must be from 0 to 2^30", shape->GetDim(at));
    return true;
}

// The attribute of a group at `place`: null if a matrix of k rows cannot have it.
template <class Context> const int64_t* read_group(const Context* context, size_t place, int64_t k) {
    const int64_t* group = context->GetAttrs()->GetInt(place);
    if (!group) return fail(context, "the group must be given", 0), nullptr;
    if (*group != 32 && *group != 64 && *group != 128)
        return fail(context, "a group must be 32, 64 or 128 rows", *group), nullptr;
    if (k < kStep || k % kStep) return fail(context, "K must be a multiple of 32", k), nullptr;
    if (k > kMostSize) return fail(context, "K must be 2^30 at most", k), nullptr;
    if (k % *group) return fail(context, "a group must divide its matrix's rows", *group), nullptr;
    return group;
}

// Checks w ([E,] sections * planes, N, lanes / 2), scales and zeros ([E,] sections, N, kept) at `place`, `place` + 1,
// `place` + 2 against a layout and a number of columns.
inline bool check_weight(const gert::TilingContext* context, size_t place, size_t rank, const Planes& planes,
                         int64_t n) {
    if (!has_rank(context, place, rank) || !has_rank(context, place + 1, rank)) return false;
    const gert::Shape &w = *shape_at(context, place), &scales = *shape_at(context, place + 1);
    const gert::Shape* zeros = shape_at(context, place + 2);
    if (n < kColumns || n % kColumns) return fail(context, "N must be a multiple of 8", n);
    if (w.GetDim(rank - 3) != planes.sections * planes.planes || w.GetDim(rank - 2) != n ||
        w.GetDim(rank - 1) != planes.lanes / 2)
        return fail(context, "w must have the planes, columns and lanes of its K and group", w.GetDim(rank - 3));
    if (scales.GetDim(rank - 3) != planes.sections || scales.GetDim(rank - 2) != n ||
        scales.GetDim(rank - 1) != planes.kept())
        return fail(context, "scales must have a value for each column and group", scales.GetShapeSize());
    if (rank == 4 && scales.GetDim(0) != w.GetDim(0))
        return fail(context, "w and scales must have as many experts, one or more", scales.GetDim(0));
    if (zeros && !(*zeros == scales))
        return fail(context, "zeros must have as many values as scales, in the same shape", zeros->GetShapeSize());
    return true;
}

// Fills in the sizes of a mixture of `topK` experts for each token. Its inputs begin with x, w13, s13, z13, w2, s2, z2;
// its groups are the attributes `group` and `group` + 1.
inline bool read_mixture(const gert::TilingContext* context, size_t group, int64_t topK, Problem& problem) {
    const size_t X = 0, W13 = 1, Z13 = 3, W2 = 4, Z2 = 6;
    if (!has_rank(context, X, 2) || !has_rank(context, W13, 4) || !has_rank(context, W2, 4)) return false;
    const gert::Shape &x = *shape_at(context, X), &w13 = *shape_at(context, W13), &w2 = *shape_at(context, W2);
    const int64_t hidden = x.GetDim(1), inner = w13.GetDim(2) / 2, experts = w13.GetDim(0);
    const int64_t* first = read_group(context, group, hidden);
    const int64_t* second = first ? read_group(context, group + 1, inner) : nullptr;
    if (!second) return false;
    const bool zeros = shape_at(context, Z13), zeros2 = shape_at(context, Z2);
    problem = {x.GetDim(0),
               topK,
               experts,
               hidden,
               inner,
               zeros,
               true,
               false,
               planes_of(hidden, *first, false),
               planes_of(inner, *second, true)};
    if (!check_weight(context, W13, 4, problem.first, 2 * inner) ||
        !check_weight(context, W2, 4, problem.second, hidden))
        return false;
    if (w2.GetDim(0) != experts || experts < 1)
        return fail(context, "w2 must have as many experts as w13", w2.GetDim(0));
    if (zeros != zeros2) return fail(context, "zero points must belong to both of w13 and w2", zeros2);
    return true;
}

// Bytes of our part of the workspace, for a mixture: h (pairs, I), and the largest value of each tile of each row.
inline int64_t workspace_bytes(const Problem& problem) {
    const int64_t pairs = problem.tokens * problem.topK;
    return (pairs * problem.n + problem.n / kPairs * ((pairs + 7) / 8 * 8)) * sizeof(float);
}

// Fills in everything that a launch needs. The cores wait for each other, so all must start together. `bytes` are those of
// our part of the workspace; `key` is added to the tiling key.
inline ge::graphStatus fill(gert::TilingContext* context, const Problem& problem, ge::DataType type, uint64_t key,
                            int64_t bytes, const Block& block, const Scoring& scoring) {
    const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    const uint32_t cores = platform.GetCoreNumAiv();
    if (!cores) return fail(context, "the platform must have vector cores", cores), ge::GRAPH_FAILED;
    optiling::UmbraGemvTiling tiling;
    tiling.set_tokens(problem.tokens);
    tiling.set_topK(problem.topK);
    tiling.set_experts(problem.experts);
    tiling.set_k(problem.k);
    tiling.set_n(problem.n);
    tiling.set_zeros(problem.zeros);
    tiling.set_pairs(problem.pairs);
    tiling.set_tiles(problem.tiles);
    tiling.set_sections(problem.first.sections);
    tiling.set_groups(problem.first.groups);
    tiling.set_planes(problem.first.planes);
    tiling.set_lanes(problem.first.lanes);
    tiling.set_unit(problem.first.unit);
    tiling.set_sections2(problem.second.sections);
    tiling.set_groups2(problem.second.groups);
    tiling.set_planes2(problem.second.planes);
    tiling.set_lanes2(problem.second.lanes);
    tiling.set_unit2(problem.second.unit);
    tiling.set_s13(block.s13);
    tiling.set_z13(block.z13);
    tiling.set_w2(block.w2);
    tiling.set_s2(block.s2);
    tiling.set_z2(block.z2);
    tiling.set_scored(scoring.scored);
    tiling.set_first(scoring.first);
    tiling.set_sigmoid(scoring.sigmoid);
    tiling.set_floatScores(scoring.floats);
    tiling.SaveToBuffer(context->GetRawTilingData()->GetData(), context->GetRawTilingData()->GetCapacity());
    context->GetRawTilingData()->SetDataSize(tiling.GetDataSize());

    context->SetTilingKey((type == ge::DT_FLOAT16 ? kHalf : kBfloat16) + key);
    context->SetBlockDim(cores);
    context->SetScheduleMode(kAllCoresAtOnce);
    context->GetWorkspaceSizes(1)[0] = platform.GetLibApiWorkSpaceSize() + bytes;
    return ge::GRAPH_SUCCESS;
}

// Checks a product, and fills in what its launch needs. `sums` is the index of the attribute float_sums.
inline ge::graphStatus launch(gert::TilingContext* context, const Problem& problem, bool fused, size_t sums,
                              const Block& block = Block(), const Scoring& scoring = Scoring()) {
    const ge::DataType type = context->GetInputDesc(0)->GetDataType();
    if (type != ge::DT_FLOAT16 && type != ge::DT_BF16)
        return fail(context, "x must be float16 or bfloat16", type), ge::GRAPH_FAILED;
    if (problem.tokens < 1 || problem.topK < 1)
        return fail(context, "there must be a token and an expert for it", problem.tokens), ge::GRAPH_FAILED;
    if (problem.tokens > kMostTokens)
        return fail(context, "there must be 8 tokens at most", problem.tokens), ge::GRAPH_FAILED;
    if (problem.k > kMostRows) return fail(context, "K must be 8192 at most", problem.k), ge::GRAPH_FAILED;
    if (fused && problem.n > kMostInner) return fail(context, "I must be 4096 at most", problem.n), ge::GRAPH_FAILED;
    if (problem.tokens * problem.topK > kMostPairs)
        return fail(context, "there must be 256 pairs of a token and an expert at most", problem.tokens * problem.topK),
               ge::GRAPH_FAILED;
    if (problem.experts > kMostExperts)
        return fail(context, "there must be 8192 experts at most", problem.experts), ge::GRAPH_FAILED;
    const bool* floatSums = context->GetAttrs()->GetBool(sums);
    if (!floatSums) return fail(context, "float_sums must be true or false", 0), ge::GRAPH_FAILED;

    return fill(context, problem, type, *floatSums ? kFloatSums : 0, fused ? workspace_bytes(problem) : 0, block,
                scoring);
}

inline ge::graphStatus shape_of_x(gert::InferShapeContext* context) {
    const gert::Shape* x = shape_at(context, 0);
    if (!x) return ge::GRAPH_FAILED;
    *context->GetOutputShape(0) = *x;
    return ge::GRAPH_SUCCESS;
}

inline ge::graphStatus type_of_x(gert::InferDataTypeContext* context) {
    return context->SetOutputDataType(0, context->GetInputDataType(0));
}

}  // namespace umbra
