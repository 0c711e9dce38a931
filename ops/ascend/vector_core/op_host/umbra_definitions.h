// Definitions of operands, in C++11. Each has two variants, half and bfloat16, `times` times: where another operand of the
// op has types beside these.
#pragma once
#include <vector>

#include "register/op_def_registry.h"

namespace umbra {

inline void variants(ops::OpParamDef& param, ops::Option presence, std::vector<ge::DataType> types) {
    const std::vector<ge::Format> formats(types.size(), ge::FORMAT_ND);
    param.ParamType(presence).DataType(types).Format(formats).AutoContiguous();
}
inline std::vector<ge::DataType> repeated(ge::DataType half, ge::DataType bfloat16, size_t times) {
    std::vector<ge::DataType> types;
    for (; times; --times) types.insert(types.end(), {half, bfloat16});
    return types;
}
inline void rows(ops::OpParamDef& param, ops::Option presence, size_t times) {
    variants(param, presence, repeated(ge::DT_FLOAT16, ge::DT_BF16, times));
}
inline void fixed(ops::OpParamDef& param, ops::Option presence, ge::DataType type, size_t times) {
    variants(param, presence, repeated(type, type, times));
}
inline void scores(ops::OpParamDef& param, ops::Option presence) {
    variants(param, presence, {ge::DT_FLOAT16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT});
}

}  // namespace umbra
