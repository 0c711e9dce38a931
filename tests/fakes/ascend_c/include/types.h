// Types, enums and parameter structs of the Ascend C subset, with the real names and field widths.
//
// half is the compiler's _Float16; bfloat16_t has bits and conversions but no arithmetic, as on Atlas A2/A3.
// Not modelled: complex, 8-bit floats, tensor traits, positions of the cube unit.
#pragma once
#include <cstdint>
#include <cstring>
#include <type_traits>

// Macros, as in the real headers, so that what they make of a declaration is the same: `GM_ADDR a, b;` declares a
// pointer and a byte, and `const GM_ADDR` a pointer to const. TWIN_STRICT is for clang, which then knows the address
// space of a pointer and which functions a core can call (build.py: check). Without __global__ a kernel is not found.
#ifdef TWIN_STRICT
#define __aicore__ __attribute__((device))
#define __gm__ __attribute__((address_space(1)))
#define __ubuf__ __attribute__((address_space(2)))
#else
#define __aicore__
#define __gm__
#define __ubuf__
#endif
#define __global__ __attribute__((visibility("default")))
#define GM_ADDR __gm__ uint8_t*

using half = _Float16;
struct bfloat16_t {
    uint16_t bits;
};
struct int4b_t {  // two in a byte, low nibble first; tensors count elements, not bytes
    uint8_t pair;
};

namespace twin {
inline float to_float(float x) { return x; }
inline float to_float(half x) { return static_cast<float>(x); }
inline float to_float(bfloat16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline bfloat16_t to_bfloat16(float x) {  // rounds to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <class T> constexpr uint32_t bits_of = std::is_same_v<T, int4b_t> ? 4 : 8 * sizeof(T);
template <class T, class... Of> constexpr bool one_of = (std::is_same_v<T, Of> || ...);
template <class T> constexpr const char* name_of = "?";
template <> inline constexpr const char* name_of<half> = "half";
template <> inline constexpr const char* name_of<bfloat16_t> = "bfloat16_t";
template <> inline constexpr const char* name_of<int4b_t> = "int4b_t";
template <> inline constexpr const char* name_of<float> = "float";
template <> inline constexpr const char* name_of<int8_t> = "int8_t";
template <> inline constexpr const char* name_of<uint8_t> = "uint8_t";
template <> inline constexpr const char* name_of<int16_t> = "int16_t";
template <> inline constexpr const char* name_of<uint16_t> = "uint16_t";
template <> inline constexpr const char* name_of<int32_t> = "int32_t";
template <> inline constexpr const char* name_of<uint32_t> = "uint32_t";
template <> inline constexpr const char* name_of<int64_t> = "int64_t";
template <> inline constexpr const char* name_of<uint64_t> = "uint64_t";
}  // namespace twin

enum pipe_t { PIPE_S, PIPE_V, PIPE_MTE2, PIPE_MTE3, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

namespace AscendC {
using ::bfloat16_t;
using ::half;
using ::int4b_t;
using TEventID = int8_t;

enum class TPosition : uint8_t { GM, VECIN, VECOUT, VECCALC };
using QuePosition = TPosition;

enum class HardEvent : uint8_t {
    S_V,
    S_MTE2,
    S_MTE3,
    V_S,
    V_MTE2,
    V_MTE3,
    MTE2_S,
    MTE2_V,
    MTE2_MTE3,
    MTE3_S,
    MTE3_V,
    MTE3_MTE2,
    COUNT
};

enum class RoundMode { CAST_NONE, CAST_RINT, CAST_FLOOR, CAST_CEIL, CAST_ROUND, CAST_TRUNC, CAST_ODD };
enum class ReduceOrder { ORDER_VALUE_INDEX, ORDER_INDEX_VALUE, ORDER_ONLY_VALUE, ORDER_ONLY_INDEX };

struct BinaryRepeatParams {  // strides in blocks of 32 bytes
    BinaryRepeatParams() = default;
    BinaryRepeatParams(uint8_t dst_block, uint8_t src0_block, uint8_t src1_block, uint8_t dst_repeat,
                       uint8_t src0_repeat, uint8_t src1_repeat)
        : dstBlkStride(dst_block), src0BlkStride(src0_block), src1BlkStride(src1_block), dstRepStride(dst_repeat),
          src0RepStride(src0_repeat), src1RepStride(src1_repeat) {}
    uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
    uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};
struct UnaryRepeatParams {
    UnaryRepeatParams() = default;
    UnaryRepeatParams(uint16_t dst_block, uint16_t src_block, uint8_t dst_repeat, uint8_t src_repeat)
        : dstBlkStride(dst_block), srcBlkStride(src_block), dstRepStride(dst_repeat), srcRepStride(src_repeat) {}
    uint16_t dstBlkStride = 1, srcBlkStride = 1;
    uint8_t dstRepStride = 8, srcRepStride = 8;
};
struct BrcbRepeatParams {
    BrcbRepeatParams() = default;
    BrcbRepeatParams(uint16_t dst_block, uint16_t dst_repeat) : dstBlkStride(dst_block), dstRepStride(dst_repeat) {}
    uint16_t dstBlkStride = 1, dstRepStride = 8;
};
struct TransDataTo5HDParams {  // strides in blocks
    TransDataTo5HDParams() = default;
    TransDataTo5HDParams(bool dst_high, bool src_high, uint8_t repeats, uint16_t dst_repeat, uint16_t src_repeat)
        : dstHighHalf(dst_high), srcHighHalf(src_high), repeatTimes(repeats), dstRepStride(dst_repeat),
          srcRepStride(src_repeat) {}
    bool dstHighHalf = false, srcHighHalf = false;  // of 8-bit values only
    uint8_t repeatTimes = 1;
    uint16_t dstRepStride = 0, srcRepStride = 0;
};
struct DataCopyParams {  // everything in blocks of 32 bytes
    DataCopyParams() = default;
    DataCopyParams(uint16_t count, uint16_t length, uint16_t src_gap, uint16_t dst_gap)
        : blockCount(count), blockLen(length), srcGap(src_gap), dstGap(dst_gap) {}
    uint16_t blockCount = 1, blockLen = 0, srcGap = 0, dstGap = 0;
};
struct DataCopyExtParams {  // length in bytes; strides in bytes in global memory, in blocks of 32 bytes in the UB
    DataCopyExtParams() = default;
    DataCopyExtParams(uint16_t count, uint32_t length, uint32_t src_stride, uint32_t dst_stride, uint32_t rsv_in)
        : blockCount(count), blockLen(length), srcStride(src_stride), dstStride(dst_stride), rsv(rsv_in) {}
    uint16_t blockCount = 1;
    uint32_t blockLen = 0, srcStride = 0, dstStride = 0, rsv = 0;
};
template <class T> struct DataCopyPadExtParams {  // paddings in elements
    DataCopyPadExtParams() = default;
    DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
        : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
    bool isPad = false;
    uint8_t leftPadding = 0, rightPadding = 0;
    T paddingValue{};
};

inline float ToFloat(bfloat16_t x) { return twin::to_float(x); }
inline bfloat16_t ToBfloat16(float x) { return twin::to_bfloat16(x); }
}  // namespace AscendC
