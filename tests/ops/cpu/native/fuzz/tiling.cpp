// The host side of the Ascend C ops, on the twin's headers, for inputs of any shapes and types: it refuses, or it gives
// sizes that its kernels' buffers hold.

#include "input.h"
#include "tests/fakes/ascend_c/host/host.cpp"
#include "umbra_gemv_tiling.h"
#include "umbra_planes.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    auto found = ops::registry().begin();
    std::advance(found, input.range<size_t>(0, ops::registry().size() - 1));
    const ops::OpDef& op = *found->second;
    // Shapes are made of few numbers, so that they often agree; each input may have any of the definition's variants.
    std::vector<int64_t> sizes{0, 1, 2, 8, 16, 32, 64, 128, 256, 512, 4096, 8192};
    for (int i = 0; i < 4; i++)
        sizes.push_back(input.flag() ? input.range<int64_t>(0, 600) : input.ConsumeIntegral<int64_t>());
    const int64_t group = input.one_of<int64_t>({32, 64, 128}), k = group * input.range<int64_t>(1, 12);
    const int64_t group2 = input.one_of<int64_t>({32, 64, 128}), n = group2 * input.range<int64_t>(1, 12);
    for (const umbra::Planes& p : {umbra::planes_of(k, group, false), umbra::planes_of(n, group2, true)})
        sizes.insert(sizes.end(), {p.sections, p.sections * p.planes, p.lanes / 2, p.kept()});
    sizes.insert(sizes.end(), {k, n, 2 * n, group, group2});
    const auto number = [&] { return sizes[input.range<size_t>(0, sizes.size() - 1)]; };

    const size_t variant = input.range<size_t>(0, op.inputs[0].types.size() - 1);
    std::vector<gert::Input> inputs;
    for (const auto& definition : op.inputs) {
        const bool present = definition.presence == ops::REQUIRED || input.flag();
        gert::Input one{present, {}, {definition.types.at(variant)}};
        if (input.range(0, 63) == 0) one.desc.type = static_cast<ge::DataType>(input.range(0, 30));
        for (int dims = input.range(0, 4); dims > 0; dims--) one.shape.shape.AppendDim(number());
        inputs.push_back(one);
    }
    std::vector<int64_t> attributes;
    for (size_t count = input.range<size_t>(0, op.attributes.size()); count > 0; count--)
        attributes.push_back(number());
    bool ok = false;
    launch(found->first.c_str(), inputs, attributes, input.range<uint32_t>(0, 48), ok);
    return 0;
}
