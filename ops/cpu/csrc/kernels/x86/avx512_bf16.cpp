// AVX-512 with BF16: attention multiplies in bfloat16. Matrices are multiplied as in avx512.cpp.

#include "kernels/x86/bf16.h"

namespace umbra {

const Kernels& kernels_avx512_bf16() {
    static const Kernels kernels = [] {
        Kernels own = kernels_avx512();
        own.name = "avx512_bf16";
        own.attend[static_cast<int>(Type::bf16)] = attend<Bf16Dot, Bf16>;
        own.attend[static_cast<int>(Type::i8)] = attend<Bf16Dot, int8_t>;
        return own;
    }();
    return kernels;
}

}  // namespace umbra
