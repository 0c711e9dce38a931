// y (T, N) = x (T, K) times w (K, N/8).
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraGemvW4a16, UmbraGemvTiling)

namespace gemv {

enum Place : size_t { X, W, SCALES, ZEROS };

ge::graphStatus tiling(gert::TilingContext* context) {
    umbra::Weight w;
    if (!umbra::has_rank(context, X, 2) || !umbra::read_weight(context, W, 2, w)) return ge::GRAPH_FAILED;
    const gert::Shape& x = *umbra::shape_at(context, X);
    if (x.GetDim(1) != w.k) return umbra::fail(context, "x must have K columns", x.GetDim(1)), ge::GRAPH_FAILED;
    return umbra::launch(context, {x.GetDim(0), 1, 1, w.k, w.n, w.group, 0, w.zeros}, false);
}

ge::graphStatus infer_shape(gert::InferShapeContext* context) {
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, SCALES, 2)) return ge::GRAPH_FAILED;
    gert::Shape& y = *context->GetOutputShape(0);
    y.SetDimNum(2);
    y.SetDim(0, umbra::shape_at(context, X)->GetDim(0));
    y.SetDim(1, umbra::shape_at(context, SCALES)->GetDim(1));
    return ge::GRAPH_SUCCESS;
}

}  // namespace gemv
}  // namespace optiling

namespace ops {

class UmbraGemvW4a16 : public OpDef {
public:
    explicit UmbraGemvW4a16(const char* name) : OpDef(name) {
        umbra::activation(Input("x"));
        umbra::fixed(Input("w"), ge::DT_INT32);
        umbra::activation(Input("scales"));
        umbra::optional(Input("zeros"));
        umbra::activation(Output("y"));
        Attr("half_sums").AttrType(OPTIONAL).Bool(false);
        SetInferShape(optiling::gemv::infer_shape).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::gemv::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraGemvW4a16);

}  // namespace ops
