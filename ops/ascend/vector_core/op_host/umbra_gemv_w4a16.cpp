// y (T, N) = x (T, K) times w (K, N) in planes (planes.py).
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraGemvW4a16, UmbraGemvTiling)

namespace gemv {

using namespace umbra::gemv_w4a16;

ge::graphStatus tiling(gert::TilingContext* context) {
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, W, 3)) return ge::GRAPH_FAILED;
    const gert::Shape& x = *umbra::shape_at(context, X);
    const int64_t k = x.GetDim(1), n = umbra::shape_at(context, W)->GetDim(1);
    const int64_t* group = umbra::read_group(context, GROUP, k);
    if (!group) return ge::GRAPH_FAILED;
    const umbra::Planes planes = umbra::planes_of(k, *group, false);
    if (!umbra::check_weight(context, W, 3, planes, n)) return ge::GRAPH_FAILED;
    const bool zeros = umbra::shape_at(context, ZEROS);
    return umbra::launch(context, {x.GetDim(0), 1, 1, k, n, zeros, false, false, planes, umbra::Planes()}, false,
                         FLOAT_SUMS);
}

ge::graphStatus infer_shape(gert::InferShapeContext* context) {
    if (!umbra::has_rank(context, X, 2) || !umbra::has_rank(context, W, 3)) return ge::GRAPH_FAILED;
    gert::Shape& y = *context->GetOutputShape(0);
    y.SetDimNum(2);
    y.SetDim(0, umbra::shape_at(context, X)->GetDim(0));
    y.SetDim(1, umbra::shape_at(context, W)->GetDim(1));
    return ge::GRAPH_SUCCESS;
}

}  // namespace gemv
}  // namespace optiling

namespace ops {

class UmbraGemvW4a16 : public OpDef {
public:
    explicit UmbraGemvW4a16(const char* name) : OpDef(name) {
        umbra::gemv_w4a16::define(*this);
        SetInferShape(optiling::gemv::infer_shape).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::gemv::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraGemvW4a16);

}  // namespace ops
