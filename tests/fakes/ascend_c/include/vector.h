// The vector instructions that work lane by lane: Mul, Add, ..., MulAddDst, Axpy. Others are in reduce.h and cast.h.
//
// The types are those documented for Atlas A2/A3; others do not compile. Each operation in half and float is rounded to
// nearest; MulAddDst and Axpy round after the product and after the sum. The hardware may round these only once, and
// its Div and Exp differ in the last bits.
#pragma once
#include <cmath>

#include "cast.h"

namespace twin {
template <class T> constexpr bool numeric = one_of<T, int16_t, half, int32_t, float>;
template <class T> constexpr bool chain_type = one_of<T, half, int32_t, float>;

// One operation, rounded to its type; integers wrap around.
template <class T, class F> T rounded(T a, T b, F f) {
    if constexpr (std::is_same_v<T, half>)
        return static_cast<half>(static_cast<float>(f(float(a), float(b))));
    else if constexpr (std::is_same_v<T, float>)
        return f(a, b);
    else
        return static_cast<T>(f(int64_t(a), int64_t(b)));
}
struct Times {
    template <class T> T operator()(T a, T b) const { return a * b; }
};
struct Plus {
    template <class T> T operator()(T a, T b) const { return a + b; }
};
struct Minus {
    template <class T> T operator()(T a, T b) const { return a - b; }
};
struct Over {
    template <class T> T operator()(T a, T b) const { return a / b; }
};
struct Larger {
    template <class T> T operator()(T a, T b) const { return a > b ? a : b; }
};
struct Bits {
    template <class T> T operator()(T a, T b) const { return a & b; }
};
}  // namespace twin

namespace AscendC {

// CHAINS: whether the documentation lets the second source be the destination of an earlier repeat.
#define TWIN_BINARY(NAME, F, TYPES, CHAINS)                                                                     \
    template <class T, bool isSetMask = true>                                                                   \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1, uint64_t mask, \
              uint32_t repeatTime, const BinaryRepeatParams& p) {                                               \
        static_assert(isSetMask && (TYPES), #NAME " does not support this type on Atlas A2/A3");                \
        static const uint16_t op = twin::name_op<T>(#NAME);                                                     \
        const bool chains = CHAINS && twin::chain_type<T> && !(p.dstRepStride && p.src1RepStride);              \
        twin::binary<false, T, T, T>(op, {uint32_t(mask), repeatTime, false},                                   \
                                     twin::walk(dst, "the destination", p.dstBlkStride, p.dstRepStride),        \
                                     twin::walk(src0, "src0", p.src0BlkStride, p.src0RepStride),                \
                                     twin::walk(src1, "src1", p.src1BlkStride, p.src1RepStride, chains),        \
                                     [](T a, T b, T) { return twin::rounded(a, b, twin::F{}); });               \
    }                                                                                                           \
    template <class T>                                                                                          \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src0, const LocalTensor<T>& src1,                \
              const int32_t& count) {                                                                           \
        static_assert(TYPES, #NAME " does not support this type on Atlas A2/A3");                               \
        static const uint16_t op = twin::name_op<T>(#NAME);                                                     \
        twin::binary<false, T, T, T>(op, twin::by_count(count), twin::walk(dst, "the destination"),             \
                                     twin::walk(src0, "src0"), twin::walk(src1, "src1"),                        \
                                     [](T a, T b, T) { return twin::rounded(a, b, twin::F{}); });               \
    }
TWIN_BINARY(Mul, Times, twin::numeric<T>, true)
TWIN_BINARY(Add, Plus, twin::numeric<T>, true)
TWIN_BINARY(Sub, Minus, twin::numeric<T>, true)
TWIN_BINARY(Max, Larger, twin::numeric<T>, true)
TWIN_BINARY(Div, Over, (twin::one_of<T, half, float>), false)
TWIN_BINARY(And, Bits, (twin::one_of<T, int16_t, uint16_t>), false)
#undef TWIN_BINARY

#define TWIN_SCALAR(NAME, F)                                                                                 \
    template <class T, bool isSetMask = true>                                                                \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, uint64_t mask,          \
              uint32_t repeatTime, const UnaryRepeatParams& p) {                                             \
        static_assert(isSetMask && twin::numeric<T>, #NAME " does not support this type on Atlas A2/A3");    \
        static const uint16_t op = twin::name_op<T>(#NAME);                                                  \
        twin::unary<false, T, T>(op, {uint32_t(mask), repeatTime, false},                                    \
                                 twin::walk(dst, "the destination", p.dstBlkStride, p.dstRepStride),         \
                                 twin::walk(src, "the source", p.srcBlkStride, p.srcRepStride),              \
                                 [scalar](T a) { return twin::rounded(a, scalar, twin::F{}); });             \
    }                                                                                                        \
    template <class T>                                                                                       \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const T& scalar, const int32_t& count) { \
        static_assert(twin::numeric<T>, #NAME " does not support this type on Atlas A2/A3");                 \
        static const uint16_t op = twin::name_op<T>(#NAME);                                                  \
        twin::unary<false, T, T>(op, twin::by_count(count), twin::walk(dst, "the destination"),              \
                                 twin::walk(src, "the source"),                                              \
                                 [scalar](T a) { return twin::rounded(a, scalar, twin::F{}); });             \
    }
TWIN_SCALAR(Muls, Times)
TWIN_SCALAR(Adds, Plus)
TWIN_SCALAR(Maxs, Larger)
#undef TWIN_SCALAR

#define TWIN_UNARY(NAME, EXPRESSION)                                                                            \
    template <class T, bool isSetMask = true>                                                                   \
    void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint64_t mask, uint32_t repeatTime,         \
              const UnaryRepeatParams& p) {                                                                     \
        static_assert(isSetMask && twin::one_of<T, half, float>, #NAME " takes half and float on Atlas A2/A3"); \
        static const uint16_t op = twin::name_op<T>(#NAME);                                                     \
        twin::unary<false, T, T>(op, {uint32_t(mask), repeatTime, false},                                       \
                                 twin::walk(dst, "the destination", p.dstBlkStride, p.dstRepStride),            \
                                 twin::walk(src, "the source", p.srcBlkStride, p.srcRepStride), [](T a) {       \
                                     const float x = a;                                                         \
                                     return static_cast<T>(EXPRESSION);                                         \
                                 });                                                                            \
    }                                                                                                           \
    template <class T> void NAME(const LocalTensor<T>& dst, const LocalTensor<T>& src, const int32_t& count) {  \
        static_assert(twin::one_of<T, half, float>, #NAME " takes half and float on Atlas A2/A3");              \
        static const uint16_t op = twin::name_op<T>(#NAME);                                                     \
        twin::unary<false, T, T>(op, twin::by_count(count), twin::walk(dst, "the destination"),                 \
                                 twin::walk(src, "the source"), [](T a) {                                       \
                                     const float x = a;                                                         \
                                     return static_cast<T>(EXPRESSION);                                         \
                                 });                                                                            \
    }
TWIN_UNARY(Abs, std::fabs(x))
TWIN_UNARY(Exp, std::exp(x))
#undef TWIN_UNARY

}  // namespace AscendC

namespace twin {
template <class D, class S> constexpr bool multiply_add =
    std::is_same_v<D, S> ? one_of<D, half, float> : std::is_same_v<D, float> && std::is_same_v<S, half>;
// dst + a * b. Products of halves added to a float are exact; other products are rounded to the destination's type.
template <class D, class S> D add_product(S a, S b, D d) {
    return rounded<D>(d, rounded<D>(static_cast<D>(a), static_cast<D>(b), Times{}), Plus{});
}
// A destination of a wider type may not overlap its sources at all.
template <class D, class S>
void apart(const AscendC::LocalTensor<D>& dst, const AscendC::LocalTensor<S>& src, uint16_t op) {
    core().op = op;
    if (!std::is_same_v<D, S> && dst.slot == src.slot && dst.begin == src.begin)
        core().fail("float sums over half sources in the same place");
}
}  // namespace twin

namespace AscendC {

template <class T, class U, bool isSetMask = true>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1, uint64_t mask,
               uint32_t repeatTime, const BinaryRepeatParams& p) {
    static_assert(isSetMask && twin::multiply_add<T, U>, "MulAddDst does not support these types on Atlas A2/A3");
    // sums over repeats are counted separately, since the documentation does not mention them
    static const uint16_t once = twin::name_op<T, U>("MulAddDst"), chained = twin::name_op<T, U>("MulAddDst chained");
    const uint16_t op = !p.dstRepStride && repeatTime > 1 ? chained : once;
    twin::apart(dst, src0, op), twin::apart(dst, src1, op);
    twin::binary<true, T, U, U>(op, {uint32_t(mask), repeatTime, false},
                                twin::walk(dst, "the destination", p.dstBlkStride, p.dstRepStride),
                                twin::walk(src0, "src0", p.src0BlkStride, p.src0RepStride),
                                twin::walk(src1, "src1", p.src1BlkStride, p.src1RepStride),
                                [](U a, U b, T d) { return twin::add_product<T, U>(a, b, d); });
}
template <class T, class U>
void MulAddDst(const LocalTensor<T>& dst, const LocalTensor<U>& src0, const LocalTensor<U>& src1,
               const int32_t& count) {
    static_assert(twin::multiply_add<T, U>, "MulAddDst does not support these types on Atlas A2/A3");
    static const uint16_t op = twin::name_op<T, U>("MulAddDst");
    twin::apart(dst, src0, op), twin::apart(dst, src1, op);
    twin::binary<true, T, U, U>(op, twin::by_count(count), twin::walk(dst, "the destination"), twin::walk(src0, "src0"),
                                twin::walk(src1, "src1"),
                                [](U a, U b, T d) { return twin::add_product<T, U>(a, b, d); });
}

template <class T, class U, bool isSetMask = true>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalar, uint64_t mask, uint32_t repeatTime,
          const UnaryRepeatParams& p) {
    static_assert(isSetMask && twin::multiply_add<T, U>, "Axpy does not support these types on Atlas A2/A3");
    static const uint16_t once = twin::name_op<T, U>("Axpy"), chained = twin::name_op<T, U>("Axpy chained");
    const uint16_t op = !p.dstRepStride && repeatTime > 1 ? chained : once;
    twin::apart(dst, src, op);
    twin::unary<true, T, U>(op, {uint32_t(mask), repeatTime, false},
                            twin::walk(dst, "the destination", p.dstBlkStride, p.dstRepStride),
                            twin::walk(src, "the source", p.srcBlkStride, p.srcRepStride),
                            [scalar](U a, T d) { return twin::add_product<T, U>(a, scalar, d); });
}
template <class T, class U>
void Axpy(const LocalTensor<T>& dst, const LocalTensor<U>& src, const U& scalar, const int32_t& count) {
    static_assert(twin::multiply_add<T, U>, "Axpy does not support these types on Atlas A2/A3");
    static const uint16_t op = twin::name_op<T, U>("Axpy");
    twin::apart(dst, src, op);
    twin::unary<true, T, U>(op, twin::by_count(count), twin::walk(dst, "the destination"),
                            twin::walk(src, "the source"),
                            [scalar](U a, T d) { return twin::add_product<T, U>(a, scalar, d); });
}

// Bytes 184 to 192 KB of the UB are the scratch of these calls on Atlas A2/A3; here they belong to buffers.
#define TWIN_SCRATCH(NAME)                                                                                     \
    template <class... T> void NAME(const T&...) {                                                             \
        static_assert(!sizeof...(T), #NAME " writes to bytes 184 to 192 KB of the UB, which buffers use too"); \
    }
TWIN_SCRATCH(Select)
TWIN_SCRATCH(AddDeqRelu)
#undef TWIN_SCRATCH

}  // namespace AscendC
