// y (R, k, N): row r of x (R, K) times the experts ids (R, k) of w (E, K, N/8).
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraGroupedGemvW4a16, UmbraGemvTiling)

namespace grouped_gemv {

enum Place : size_t { X, W, SCALES, ZEROS, IDS };

ge::graphStatus tiling(gert::TilingContext *context) {
    umbra::Weight w;
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, IDS, 2) || !umbra::read_weight(context, W, 3, w))
        return ge::GRAPH_FAILED;
    const gert::Shape &x = *umbra::shape_at(context, X), &ids = *umbra::shape_at(context, IDS);
    if (x.GetDim(1) != w.k)
        return umbra::fail(context, "x must have K columns", x.GetDim(1)), ge::GRAPH_FAILED;
    if (ids.GetDim(0) != x.GetDim(0))
        return umbra::fail(context, "ids must have a row for each row of x", ids.GetDim(0)), ge::GRAPH_FAILED;
    return umbra::launch(context, {x.GetDim(0), ids.GetDim(1), w.experts, w.k, w.n, w.group, 0, w.zeros}, false);
}

ge::graphStatus infer_shape(gert::InferShapeContext *context) {
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, SCALES, 3) || !umbra::has_rank(context, IDS, 2))
        return ge::GRAPH_FAILED;
    gert::Shape &y = *context->GetOutputShape(0);
    y.SetDimNum(3);
    y.SetDim(0, umbra::shape_at(context, X)->GetDim(0));
    y.SetDim(1, umbra::shape_at(context, IDS)->GetDim(1));
    y.SetDim(2, umbra::shape_at(context, SCALES)->GetDim(2));
    return ge::GRAPH_SUCCESS;
}

} // namespace grouped_gemv
} // namespace optiling

namespace ops {

class UmbraGroupedGemvW4a16 : public OpDef {
  public:
    explicit UmbraGroupedGemvW4a16(const char *name) : OpDef(name) {
        umbra::activation(Input("x"));
        umbra::fixed(Input("w"), ge::DT_INT32);
        umbra::activation(Input("scales"));
        umbra::optional(Input("zeros"));
        umbra::fixed(Input("ids"), ge::DT_INT32);
        umbra::activation(Output("y"));
        Attr("half_sums").AttrType(OPTIONAL).Bool(false);
        SetInferShape(optiling::grouped_gemv::infer_shape).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::grouped_gemv::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraGroupedGemvW4a16);

} // namespace ops
