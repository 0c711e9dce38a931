// The host side of an op for tests: y (rows of x, columns of w), with an optional bias, in two types.
#include <cstdio>

#include "probe_tiling.h"
#include "register/op_def_registry.h"
#include "tiling/platform/platform_ascendc.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(ProbeOp, ProbeTiling)

static ge::graphStatus tiling(gert::TilingContext* context) {
    const gert::Shape& x = context->GetInputShape(0)->GetStorageShape();
    const auto* bias = context->GetOptionalInputShape(1);
    const gert::Shape& w = context->GetOptionalInputShape(2)->GetStorageShape();
    if (x.GetDim(1) != w.GetDim(0)) {
        std::fprintf(stderr, "[ERROR] %s: %lld columns\n", context->GetNodeType(), (long long)x.GetDim(1));
        return ge::GRAPH_FAILED;
    }
    const platform_ascendc::PlatformAscendC platform(context->GetPlatformInfo());
    ProbeTiling data;
    data.set_first(x.GetDim(0));
    data.set_wide(uint64_t(w.GetDim(1)) << 32);
    data.set_last(bias ? bias->GetStorageShape().GetDimNum() : 99);
    data.SaveToBuffer(context->GetRawTilingData()->GetData(), context->GetRawTilingData()->GetCapacity());
    context->GetRawTilingData()->SetDataSize(data.GetDataSize());
    context->SetTilingKey(context->GetInputDesc(0)->GetDataType() == ge::DT_BF16 ? 2 : 1);
    context->SetBlockDim(platform.GetCoreNumAiv() / 2);
    context->GetWorkspaceSizes(1)[0] = platform.GetLibApiWorkSpaceSize() + 64;
    return ge::GRAPH_SUCCESS;
}
static ge::graphStatus infer_shape(gert::InferShapeContext* context) {
    *context->GetOutputShape(0) = {context->GetInputShape(0)->GetDim(0), context->GetOptionalInputShape(2)->GetDim(1)};
    return ge::GRAPH_SUCCESS;
}
static ge::graphStatus infer_type(gert::InferDataTypeContext* context) {
    return context->SetOutputDataType(0, context->GetInputDataType(0));
}

}  // namespace optiling

namespace ops {

class ProbeOp : public OpDef {
public:
    explicit ProbeOp(const char* name) : OpDef(name) {
        for (const char* input : {"x", "bias", "w"})
            Input(input)
                .ParamType(input[0] == 'b' ? OPTIONAL : REQUIRED)
                .DataType({ge::DT_FLOAT16, ge::DT_BF16})
                .Format({ge::FORMAT_ND, ge::FORMAT_ND});
        Output("y").ParamType(REQUIRED).DataType({ge::DT_FLOAT16, ge::DT_BF16}).Format({ge::FORMAT_ND, ge::FORMAT_ND});
        this->SetInferShape(optiling::infer_shape).SetInferDataType(optiling::infer_type);
        this->AICore().SetTiling(optiling::tiling);
        this->AICore().AddConfig("ascend910b");
    }
};
OP_ADD(ProbeOp);

}  // namespace ops
