// y (E, N, K) = the values of matrices w in planes (planes.py), K in the order of planes. To GE and aclnn y is ND; with
// `tiles` its memory is that of a tensor in FRACTAL_NZ, which the torch extension passes as one in ND.
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraUnpackW4a16, UmbraGemvTiling)

namespace unpack {

using namespace umbra::unpack_w4a16;

constexpr uint32_t kAnyCores = 0;  // schedule mode: no core waits for another

ge::graphStatus tiling(gert::TilingContext* context) {
    if (!umbra::has_rank(context, W, 4)) return ge::GRAPH_FAILED;
    const gert::Shape& w = *umbra::shape_at(context, W);
    const int64_t k = w.GetDim(1) * w.GetDim(3) * 2, n = w.GetDim(2);
    const int64_t* group = umbra::read_group(context, GROUP, k);
    const bool *ordered = context->GetAttrs()->GetBool(ORDERED), *pairs = context->GetAttrs()->GetBool(PAIRS);
    const bool* tiles = context->GetAttrs()->GetBool(TILES);
    if (!group || !ordered || !pairs || !tiles) return ge::GRAPH_FAILED;
    const umbra::Planes planes = umbra::planes_of(k, *group, *ordered);
    if (!umbra::check_weight(context, W, 4, planes, n)) return ge::GRAPH_FAILED;
    if (*pairs && n % (2 * umbra::kPairs))
        return umbra::fail(context, "N must be a multiple of 32 if columns are pairs", n), ge::GRAPH_FAILED;
    if (*tiles && n % umbra::kPairs)
        return umbra::fail(context, "N must be a multiple of 16 in tiles", n), ge::GRAPH_FAILED;
    const bool zeros = umbra::shape_at(context, ZEROS);
    const ge::DataType type = context->GetInputDesc(SCALES)->GetDataType();
    const umbra::Problem problem{0, 0, w.GetDim(0), k, n, zeros, *pairs, *tiles, planes, umbra::Planes()};
    if (umbra::fill(context, problem, type, 0, 0, umbra::Block(), umbra::Scoring()) != ge::GRAPH_SUCCESS)
        return ge::GRAPH_FAILED;
    context->SetScheduleMode(kAnyCores);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus infer_shape(gert::InferShapeContext* context) {
    if (!umbra::has_rank(context, W, 4)) return ge::GRAPH_FAILED;
    const gert::Shape& w = *umbra::shape_at(context, W);
    gert::Shape& y = *context->GetOutputShape(0);
    y.SetDimNum(3);
    y.SetDim(0, w.GetDim(0));
    y.SetDim(1, w.GetDim(2));
    y.SetDim(2, w.GetDim(1) * w.GetDim(3) * 2);
    return ge::GRAPH_SUCCESS;
}

ge::graphStatus infer_type(gert::InferDataTypeContext* context) {
    return context->SetOutputDataType(0, context->GetInputDataType(SCALES));
}

}  // namespace unpack
}  // namespace optiling

namespace ops {

class UmbraUnpackW4a16 : public OpDef {
public:
    explicit UmbraUnpackW4a16(const char* name) : OpDef(name) {
        umbra::unpack_w4a16::define(*this);
        SetInferShape(optiling::unpack::infer_shape).SetInferDataType(optiling::unpack::infer_type);
        AICore().SetTiling(optiling::unpack::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraUnpackW4a16);

}  // namespace ops
