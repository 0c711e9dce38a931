// Host code that the ops share: reading and checking shapes, sizing the workspace, filling the tiling struct.
//
// The code is C++11, because CANN's code generator compiles it as that.
// Inputs are found by their index in the op's definition (the GetOptional* calls); the index among the inputs that are
// present would shift when zero points are absent.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdio>

#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"
#include "umbra_gemv_tiling.h"

namespace umbra {

constexpr int64_t kNibbles = 8;                           // nibbles in an int32
constexpr int64_t kStep = 32;                             // rows of a weight that a kernel reads at once
constexpr int64_t kTileColumns = 64;                      // columns of the narrowest tile
constexpr int64_t kLeastPart = 128;                       // fewest rows of a part of K
constexpr int64_t kMostPairs = 256, kMostExperts = 8192;  // the capacity of a kernel's plan (umbra_plan.h)
constexpr uint64_t kHalf = 1, kBfloat16 = 2;              // tiling keys
constexpr uint64_t kHalfSums = 2;                         // added to the tiling key
constexpr uint32_t kAllCoresAtOnce = 1;  // schedule mode: kernels wait for each other's cores (SyncAll)

struct Weight {
    int64_t experts, k, n, group;
    bool zeros;
};

// The sizes in the tiling struct; for a mixture n is I.
struct Problem {
    int64_t tokens, topK, experts, k, n, group, group2;
    bool zeros;
};

// First bytes of the planes after w13 in an expert's block in an arena, and the block's end.
struct Block {
    int64_t s13, z13, w2, s2, z2, end;
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
    if (found == static_cast<int64_t>(rank)) return true;
    std::fprintf(stderr, "[ERROR] %s: input %zu must have %zu dimensions (found %lld)\n", context->GetNodeType(), place,
                 rank, static_cast<long long>(found));
    return false;
}

// w (E, K, N/8), scales and zeros (E, K/G, N) at `place`, `place` + 1, `place` + 2; without E: one expert.
inline bool read_weight(const gert::TilingContext* context, size_t place, size_t rank, Weight& weight) {
    if (!has_rank(context, place, rank) || !has_rank(context, place + 1, rank)) return false;
    const gert::Shape &w = *shape_at(context, place), &scales = *shape_at(context, place + 1);
    const gert::Shape* zeros = shape_at(context, place + 2);
    const int64_t groups = scales.GetDim(rank - 2);
    weight = {rank == 3 ? w.GetDim(0) : 1, w.GetDim(rank - 2), scales.GetDim(rank - 1), 0, zeros != nullptr};
    if (weight.experts < 1 || (rank == 3 && scales.GetDim(0) != weight.experts))
        return fail(context, "w and scales must have as many experts, one or more", scales.GetDim(0));
    if (weight.k < kStep || weight.k % kStep) return fail(context, "K must be a multiple of 32", weight.k);
    if (groups < 1 || weight.k % groups) return fail(context, "the rows of scales must divide K", groups);
    weight.group = weight.k / groups;
    if (weight.group != 32 && weight.group != 64 && weight.group != 128)
        return fail(context, "a group must be 32, 64 or 128 rows", weight.group);
    if (weight.n < kNibbles || weight.n % kNibbles || w.GetDim(rank - 1) != weight.n / kNibbles)
        return fail(context, "N, the columns of scales, must be 8 times those of w", weight.n);
    if (zeros && !(*zeros == scales))
        return fail(context, "zeros must have as many values as scales, in the same shape", zeros->GetShapeSize());
    return true;
}

// Most parts that K is split into: more than one only if there are fewer tiles of columns than cores.
inline int64_t most_parts(int64_t cores, int64_t n, int64_t k) {
    const int64_t tiles = std::max<int64_t>(1, (n + kTileColumns - 1) / kTileColumns);
    return std::max<int64_t>(1, std::min(cores / tiles, k / kLeastPart));
}

// Number of floats in our part of the workspace. The kernels' layout, with P = tokens * topK (token, expert) pairs:
//   gemv   sums of the parts of K (parts, P, N) if parts > 1, else nothing
//   fused  gate and up of each part (parts, P, 2 I) if parts > 1; then the input of W2, in half with its powers of two,
//          in P I floats; then each pair's share of y (P, H)
inline int64_t workspace_floats(const Problem& problem, bool fused, int64_t parts) {
    const int64_t pairs = problem.tokens * problem.topK;
    if (fused) return pairs * problem.n * (parts > 1 ? 2 * parts : 0) + pairs * problem.n + pairs * problem.k;
    return parts > 1 ? parts * pairs * problem.n : 0;
}

// Fills in everything that a launch needs. The kernel's cores wait for each other, so all must start together. `sums` is
// the index of the attribute half_sums.
inline ge::graphStatus launch(gert::TilingContext* context, const Problem& problem, bool fused, size_t sums = 0,
                              const Block& block = Block()) {
    const ge::DataType type = context->GetInputDesc(0)->GetDataType();
    if (type != ge::DT_FLOAT16 && type != ge::DT_BF16)
        return fail(context, "x must be float16 or bfloat16", type), ge::GRAPH_FAILED;
    if (problem.tokens < 1 || problem.topK < 1)
        return fail(context, "there must be a token and an expert for it", problem.tokens), ge::GRAPH_FAILED;
    if (problem.tokens * problem.topK > kMostPairs)
        return fail(context, "there must be 256 pairs of a token and an expert at most", problem.tokens * problem.topK),
               ge::GRAPH_FAILED;
    if (problem.experts > kMostExperts)
        return fail(context, "there must be 8192 experts at most", problem.experts), ge::GRAPH_FAILED;
    const bool* halfSums = context->GetAttrs()->GetBool(sums);
    if (!halfSums) return fail(context, "half_sums must be true or false", 0), ge::GRAPH_FAILED;
    const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    const uint32_t cores = platform.GetCoreNumAiv();
    if (!cores) return fail(context, "the platform must have vector cores", cores), ge::GRAPH_FAILED;
    const int64_t parts = most_parts(cores, problem.n, problem.k);

    optiling::UmbraGemvTiling tiling;
    tiling.set_tokens(problem.tokens);
    tiling.set_topK(problem.topK);
    tiling.set_experts(problem.experts);
    tiling.set_k(problem.k);
    tiling.set_n(problem.n);
    tiling.set_group(problem.group);
    tiling.set_group2(problem.group2);
    tiling.set_zeros(problem.zeros);
    tiling.set_cores(cores);
    tiling.set_parts(parts);
    tiling.set_s13(block.s13);
    tiling.set_z13(block.z13);
    tiling.set_w2(block.w2);
    tiling.set_s2(block.s2);
    tiling.set_z2(block.z2);
    tiling.SaveToBuffer(context->GetRawTilingData()->GetData(), context->GetRawTilingData()->GetCapacity());
    context->GetRawTilingData()->SetDataSize(tiling.GetDataSize());

    context->SetTilingKey((type == ge::DT_FLOAT16 ? kHalf : kBfloat16) + (*halfSums ? kHalfSums : 0));
    context->SetBlockDim(cores);
    context->SetScheduleMode(kAllCoresAtOnce);
    context->GetWorkspaceSizes(1)[0] =
        platform.GetLibApiWorkSpaceSize() + workspace_floats(problem, fused, parts) * sizeof(float);
    return ge::GRAPH_SUCCESS;
}

// Definitions: every parameter has two variants, half and bfloat16.
inline void variants(ops::OpParamDef& param, ops::Option presence, ge::DataType half, ge::DataType bfloat16) {
    param.ParamType(presence).DataType({half, bfloat16}).Format({ge::FORMAT_ND, ge::FORMAT_ND}).AutoContiguous();
}
inline void activation(ops::OpParamDef& param) { variants(param, ops::REQUIRED, ge::DT_FLOAT16, ge::DT_BF16); }
inline void optional(ops::OpParamDef& param) { variants(param, ops::OPTIONAL, ge::DT_FLOAT16, ge::DT_BF16); }
inline void fixed(ops::OpParamDef& param, ge::DataType type) { variants(param, ops::REQUIRED, type, type); }

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
