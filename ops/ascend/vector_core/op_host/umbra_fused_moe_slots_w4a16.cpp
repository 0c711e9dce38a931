// y (T, H) as umbra_fused_moe_w4a16 computes it, with experts in slots of an arena. places (E) holds each expert's first
// byte / 512, or -1 if it is not resident; such experts add nothing. I, the groups and whether there are zero points are
// attributes, because a flat arena does not show them.
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraFusedMoeSlotsW4a16, UmbraGemvTiling)

namespace fused_moe_slots {

using namespace umbra::fused_moe_slots_w4a16;

constexpr int64_t kPlace = 512;  // bytes

int64_t placed(int64_t bytes) { return (bytes + kPlace - 1) / kPlace * kPlace; }

// The layout of ops/ascend/vector_core/blocks.py, by which the host fills blocks: w13 and w2 in nibbles, each followed by
// its scales and zero points.
umbra::Block block_of(const umbra::Problem& problem) {
    const int64_t each = 2, nibbles = problem.k * problem.n;  // bytes of a scale; nibbles of w2
    const int64_t scales = placed(problem.first.sections * problem.first.kept() * 2 * problem.n * each);
    const int64_t scales2 = placed(problem.second.sections * problem.second.kept() * problem.k * each);
    umbra::Block block;
    block.s13 = placed(nibbles);
    block.z13 = block.s13 + scales;
    block.w2 = block.z13 + (problem.zeros ? scales : 0);
    block.s2 = block.w2 + placed(nibbles / 2);
    block.z2 = block.s2 + scales2;
    return block;
}

ge::graphStatus tiling(gert::TilingContext* context) {
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, ARENA, 1) ||
        !umbra::has_rank(context, PLACES, 1) || !umbra::has_rank(context, IDS, 2) ||
        !umbra::has_rank(context, WEIGHTS, 2))
        return ge::GRAPH_FAILED;
    const int64_t* inner = context->GetAttrs()->GetInt(INNER);
    const bool* zeros = context->GetAttrs()->GetBool(ZEROS);
    if (!inner || !zeros) return umbra::fail(context, "inner and zeros must be given", 0), ge::GRAPH_FAILED;
    const gert::Shape &x = *umbra::shape_at(context, X), &ids = *umbra::shape_at(context, IDS);
    const int64_t hidden = x.GetDim(1), experts = umbra::shape_at(context, PLACES)->GetDim(0);
    const int64_t* group = umbra::read_group(context, GROUP, hidden);
    const int64_t* group2 = group ? umbra::read_group(context, GROUP2, *inner) : nullptr;
    if (!group2) return ge::GRAPH_FAILED;
    if (experts < 1) return umbra::fail(context, "there must be a place for each expert", experts), ge::GRAPH_FAILED;
    if (ids.GetDim(0) != x.GetDim(0))
        return umbra::fail(context, "ids must have a row for each row of x", ids.GetDim(0)), ge::GRAPH_FAILED;
    const gert::Shape& weights = *umbra::shape_at(context, WEIGHTS);
    if (!(weights == ids))
        return umbra::fail(context, "weights must have the shape of ids", weights.GetShapeSize()), ge::GRAPH_FAILED;
    const umbra::Problem problem{x.GetDim(0),
                                 ids.GetDim(1),
                                 experts,
                                 hidden,
                                 *inner,
                                 *zeros,
                                 true,
                                 false,
                                 umbra::planes_of(hidden, *group, false),
                                 umbra::planes_of(*inner, *group2, true)};
    return umbra::launch(context, problem, true, FLOAT_SUMS, block_of(problem));
}

}  // namespace fused_moe_slots
}  // namespace optiling

namespace ops {

class UmbraFusedMoeSlotsW4a16 : public OpDef {
public:
    explicit UmbraFusedMoeSlotsW4a16(const char* name) : OpDef(name) {
        umbra::fused_moe_slots_w4a16::define(*this);
        SetInferShape(umbra::shape_of_x).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::fused_moe_slots::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraFusedMoeSlotsW4a16);

}  // namespace ops
