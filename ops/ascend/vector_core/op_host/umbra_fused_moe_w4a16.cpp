// y (T, H) = for each row of x (T, H) the sum over its experts ids (T, k) of weight * down(silu(gate) * up), with gate
// and up in w13 and down in w2, in planes (planes.py).
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraFusedMoeW4a16, UmbraGemvTiling)

namespace fused_moe {

using namespace umbra::fused_moe_w4a16;

ge::graphStatus tiling(gert::TilingContext* context) {
    if (!umbra::has_rank(context, IDS, 2) || !umbra::has_rank(context, WEIGHTS, 2)) return ge::GRAPH_FAILED;
    const gert::Shape &ids = *umbra::shape_at(context, IDS), &weights = *umbra::shape_at(context, WEIGHTS);
    umbra::Problem problem;
    if (!umbra::read_mixture(context, GROUP, ids.GetDim(1), problem)) return ge::GRAPH_FAILED;
    if (ids.GetDim(0) != problem.tokens)
        return umbra::fail(context, "ids must have a row for each row of x", ids.GetDim(0)), ge::GRAPH_FAILED;
    if (!(weights == ids))
        return umbra::fail(context, "weights must have the shape of ids", weights.GetShapeSize()), ge::GRAPH_FAILED;
    return umbra::launch(context, problem, true, FLOAT_SUMS);
}

}  // namespace fused_moe
}  // namespace optiling

namespace ops {

class UmbraFusedMoeW4a16 : public OpDef {
public:
    explicit UmbraFusedMoeW4a16(const char* name) : OpDef(name) {
        umbra::fused_moe_w4a16::define(*this);
        SetInferShape(umbra::shape_of_x).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::fused_moe::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraFusedMoeW4a16);

}  // namespace ops
