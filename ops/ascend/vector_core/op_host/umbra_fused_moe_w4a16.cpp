// y (T, H) = for each row of x (T, H) the sum over its experts ids (T, k) of weight * down(silu(gate) * up), with gate
// and up side by side in w13 (E, H, 2I/8) and down in w2 (E, I, H/8).
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraFusedMoeW4a16, UmbraGemvTiling)

namespace fused_moe {

enum Place : size_t { X, W13, S13, Z13, W2, S2, Z2, IDS, WEIGHTS };

ge::graphStatus tiling(gert::TilingContext* context) {
    umbra::Weight w13, w2;
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, IDS, 2) || !umbra::has_rank(context, WEIGHTS, 2) ||
        !umbra::read_weight(context, W13, 3, w13) || !umbra::read_weight(context, W2, 3, w2))
        return ge::GRAPH_FAILED;
    const gert::Shape &x = *umbra::shape_at(context, X), &ids = *umbra::shape_at(context, IDS);
    if (x.GetDim(1) != w13.k || w2.n != w13.k)
        return umbra::fail(context, "x, w13 and w2 must agree in H, the rows of w13", w13.k), ge::GRAPH_FAILED;
    if (w13.n != 2 * w2.k)
        return umbra::fail(context, "w13 must have two columns for each row of w2", w13.n), ge::GRAPH_FAILED;
    if (w2.experts != w13.experts)
        return umbra::fail(context, "w2 must have as many experts as w13", w2.experts), ge::GRAPH_FAILED;
    if (w2.zeros != w13.zeros)
        return umbra::fail(context, "zero points must belong to both of w13 and w2", w2.zeros), ge::GRAPH_FAILED;
    if (ids.GetDim(0) != x.GetDim(0))
        return umbra::fail(context, "ids must have a row for each row of x", ids.GetDim(0)), ge::GRAPH_FAILED;
    const gert::Shape& weights = *umbra::shape_at(context, WEIGHTS);
    if (!(weights == ids))
        return umbra::fail(context, "weights must have the shape of ids", weights.GetShapeSize()), ge::GRAPH_FAILED;
    return umbra::launch(context,
                         {x.GetDim(0), ids.GetDim(1), w13.experts, w13.k, w2.k, w13.group, w2.group, w13.zeros}, true);
}

}  // namespace fused_moe
}  // namespace optiling

namespace ops {

class UmbraFusedMoeW4a16 : public OpDef {
public:
    explicit UmbraFusedMoeW4a16(const char* name) : OpDef(name) {
        umbra::activation(Input("x"));
        umbra::fixed(Input("w13"), ge::DT_INT32);
        umbra::activation(Input("s13"));
        umbra::optional(Input("z13"));
        umbra::fixed(Input("w2"), ge::DT_INT32);
        umbra::activation(Input("s2"));
        umbra::optional(Input("z2"));
        umbra::fixed(Input("ids"), ge::DT_INT32);
        umbra::activation(Input("weights"));
        umbra::activation(Output("y"));
        Attr("half_sums").AttrType(OPTIONAL).Bool(false);
        SetInferShape(umbra::shape_of_x).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::fused_moe::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraFusedMoeW4a16);

}  // namespace ops
