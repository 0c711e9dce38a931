// Asks for sets of kernels by any name, multiplies with every set that this CPU has, on weights and activations of any
// bits, and reads descriptions of the machine (sysfs) with any content.

#include <sys/stat.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <stdexcept>

#include "input.h"
#include "kernels/dispatch.h"
#include "kernels/ops.h"

using namespace umbra;

namespace {

void names(Input& input) {
    const std::string name = input.ConsumeRandomLengthString(24).c_str();  // up to the first NUL
    bool usable = name == "auto";
    for (const std::string& other : usable_sets()) usable |= name == other;
    try {
        choose_kernels(name);
        demand(usable, "a set that is not usable is refused");
    } catch (const std::invalid_argument& error) {
        demand(!usable, "a usable set is found");
        demand(std::string(error.what()).find("usable: generic") != std::string::npos,
               "a refusal names what is usable");
    }
}

void machine(Input& input) {
    static const std::string root = [] {
        const char* place = std::getenv("TMPDIR");
        std::string made = std::string(place ? place : "/tmp") + "/umbra_XXXXXX";
        demand(mkdtemp(made.data()), "a folder can be made");
        for (const char* sub : {"/node", "/node/node0", "/node/node1", "/cpu", "/cpu/cpu0", "/cpu/cpu0/topology",
                                "/cpu/cpu1", "/cpu/cpu1/topology"})
            mkdir((made + sub).c_str(), 0700);
        return made;
    }();
    for (const char* file : {"/node/online", "/node/node0/cpulist", "/node/node1/cpulist",
                             "/cpu/cpu0/topology/thread_siblings_list", "/cpu/cpu1/topology/thread_siblings_list"}) {
        unlink((root + file).c_str());
        if (input.range(0, 3)) std::ofstream(root + file) << input.ConsumeRandomLengthString(32);
    }
    std::vector<int> allowed;
    for (int cpu = 0; cpu < kMostCpus; cpu += input.range(1, 600)) allowed.push_back(cpu);
    const std::vector<Node> nodes = read_nodes(root, allowed);
    size_t cpus = 0;
    for (const Node& node : nodes)
        for (const auto& core : node.cores) {
            cpus += core.size();
            for (int cpu : core) demand(std::count(allowed.begin(), allowed.end(), cpu) == 1, "only allowed CPUs");
        }
    demand(cpus == allowed.size(), "every allowed CPU is on one node");
    const int ranks = input.range(1, 300), device = input.range(1, 200), shadow = input.range(0, 200);
    const std::vector<Node> mine = share(nodes, input.range(0, ranks - 1), ranks);
    demand(!mine.empty(), "a rank has a core");
    for (const auto& teams : {divide(mine, device, shadow).first, divide(mine, device, shadow).second}) {
        int threads = 0;
        for (const Team& team : teams) {
            demand(team.threads > 0 && team.memory < kMostCpus,
                   "a team has threads, and its node's number is in range");
            threads += team.threads;
        }
        demand(threads == device || threads == shadow, "all threads are placed");
    }
}

void product(Input& input) {
    Matrix w;
    w.format = static_cast<Format>(input.range(0, kFormats - 1));
    const bool grouped = traits_of(w.format).scales != Scales::none;
    w.n = input.range(1, 6) * kRows;
    w.group = grouped ? input.one_of({32, 64, 128}) : 0;
    w.k = grouped ? w.group * input.range(1, 3) : input.range(1, 70);
    const std::vector<std::string> sets = usable_sets();
    const Kernels& kernels = choose_kernels(sets[input.range<size_t>(0, sets.size() - 1)]);
    w.order = kernels.order;
    const bool zeros = w.format == format_named("q4") && input.flag();
    const auto fill = [&](const Plane& plane, size_t bytes) {
        const std::vector<uint8_t> values = input.values<uint8_t>(bytes);
        std::copy(values.begin(), values.end(), plane.at());
        return plane.at();
    };
    const size_t blocks = w.n / kRows, scales = blocks * w.scale_count();
    const Plane quants(blocks * w.quant_stride()), scale(scales * 2), zero(zeros ? scales : 0);
    w.quants = fill(quants, blocks * w.quant_stride());
    if (scales) w.scales = reinterpret_cast<const uint16_t*>(fill(scale, scales * 2));
    if (zeros) w.zeros = fill(zero, scales);

    const int64_t tokens = input.range(0, 7) ? input.range(1, 9) : input.range(1, 70);  // many take most of the time
    const int64_t n = w.n - input.range(0, kRows - 1);
    const std::vector<float> x = input.values<float>(tokens * w.k);
    std::vector<uint8_t> scratch(Scratch::bytes(tokens, w.k));
    std::vector<float> out(tokens * n), alone(n);
    static Pool pool(1);  // a matrix of one part
    Context context{pool, kernels};
    Linear{w, x.data(), nullptr, out.data(), Scratch{scratch.data()}, tokens, n}.run(context);
    const int64_t last = tokens - 1;
    Linear{w, x.data() + last * w.k, nullptr, alone.data(), Scratch{scratch.data()}, 1, n}.run(context);
    for (int64_t i = 0; i < n; i++) {  // a NaN's sign and payload depend on the order of operands
        const float a = out[last * n + i], b = alone[i];
        demand((std::isnan(a) && std::isnan(b)) || memcmp(&a, &b, 4) == 0,
               "a row's products do not depend on the other rows");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    switch (input.range(0, 7)) {
        case 0: names(input); break;
        case 1: machine(input); break;
        default: product(input);
    }
    return 0;
}
