// y (T, H) = for each row of x (T, H) the sum over its experts ids (T, k) of weight * down(silu(gate) * up), with gate
// and up in w13 and down in w2, in planes (planes.py).
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraFusedMoeW4a16, UmbraGemvTiling)

namespace fused_moe {

enum Place : size_t { X, W13, S13, Z13, W2, S2, Z2, IDS, WEIGHTS };

enum Attribute : size_t { GROUP, GROUP2, FLOAT_SUMS };

ge::graphStatus tiling(gert::TilingContext* context) {
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, IDS, 2) || !umbra::has_rank(context, WEIGHTS, 2) ||
        !umbra::has_rank(context, W13, 4) || !umbra::has_rank(context, W2, 4))
        return ge::GRAPH_FAILED;
    const gert::Shape &x = *umbra::shape_at(context, X), &w13 = *umbra::shape_at(context, W13);
    const gert::Shape &w2 = *umbra::shape_at(context, W2), &ids = *umbra::shape_at(context, IDS);
    const int64_t hidden = x.GetDim(1), inner = w13.GetDim(2) / 2, experts = w13.GetDim(0);
    const int64_t* group = umbra::read_group(context, GROUP, hidden);
    const int64_t* group2 = group ? umbra::read_group(context, GROUP2, inner) : nullptr;
    if (!group2) return ge::GRAPH_FAILED;
    const umbra::Planes first = umbra::planes_of(hidden, *group, false),
                        second = umbra::planes_of(inner, *group2, true);
    if (!umbra::check_weight(context, W13, 4, first, 2 * inner) || !umbra::check_weight(context, W2, 4, second, hidden))
        return ge::GRAPH_FAILED;
    const bool zeros = umbra::shape_at(context, Z13), zeros2 = umbra::shape_at(context, Z2);
    if (w2.GetDim(0) != experts || experts < 1)
        return umbra::fail(context, "w2 must have as many experts as w13", w2.GetDim(0)), ge::GRAPH_FAILED;
    if (zeros != zeros2)
        return umbra::fail(context, "zero points must belong to both of w13 and w2", zeros2), ge::GRAPH_FAILED;
    if (ids.GetDim(0) != x.GetDim(0))
        return umbra::fail(context, "ids must have a row for each row of x", ids.GetDim(0)), ge::GRAPH_FAILED;
    const gert::Shape& weights = *umbra::shape_at(context, WEIGHTS);
    if (!(weights == ids))
        return umbra::fail(context, "weights must have the shape of ids", weights.GetShapeSize()), ge::GRAPH_FAILED;
    return umbra::launch(context,
                         {x.GetDim(0), ids.GetDim(1), experts, hidden, inner, zeros, true, false, first, second}, true,
                         FLOAT_SUMS);
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
