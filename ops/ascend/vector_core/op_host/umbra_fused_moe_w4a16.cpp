// y (T, H) = for each row of x (T, H) the sum over its experts ids (T, k) of weight * down(silu(gate) * up), with gate
// and up in w13 and down in w2, in planes (planes.py).
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraFusedMoeW4a16, UmbraGemvTiling)

namespace fused_moe {

enum Place : size_t { X, W13, S13, Z13, W2, S2, Z2, IDS, WEIGHTS };

enum Attribute : size_t { GROUP, GROUP2, FLOAT_SUMS };

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
        umbra::activation(Input("x"));
        umbra::fixed(Input("w13"), ge::DT_UINT8);
        umbra::activation(Input("s13"));
        umbra::optional(Input("z13"));
        umbra::fixed(Input("w2"), ge::DT_UINT8);
        umbra::activation(Input("s2"));
        umbra::optional(Input("z2"));
        umbra::fixed(Input("ids"), ge::DT_INT32);
        umbra::activation(Input("weights"));
        umbra::activation(Output("y"));
        Attr("group").AttrType(REQUIRED).Int();
        Attr("group2").AttrType(REQUIRED).Int();
        Attr("float_sums").AttrType(OPTIONAL).Bool(false);
        SetInferShape(umbra::shape_of_x).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::fused_moe::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraFusedMoeW4a16);

}  // namespace ops
