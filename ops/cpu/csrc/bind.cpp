// The Python side: pointers and sizes in, nothing of torch. One engine in a process: a pool, a set of kernels, and the
// tape that is being captured, if any. `ops/cpu/engine.py` is the only caller and checks types and shapes.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <string>

#include "buffer.h"
#include "copier.h"
#include "dispatch.h"
#include "pack.h"
#include "probe.h"
#include "tape.h"
#include "worker.h"

namespace py = pybind11;
using namespace umbra;

namespace {

struct Engine {
    std::vector<Team> teams;
    std::unique_ptr<Pool> pool;
    const Kernels* kernels = nullptr;
    Tape* capturing = nullptr;
};
Engine engine;

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

struct HostNode {  // Python code at its place on the tape; an exception ends the replay and reaches its caller
    py::function function;
    void run(Context&) const {
        py::gil_scoped_acquire acquire;
        function();
    }
};

template <class Op>
void submit(const Op& op) {
    if (engine.capturing) engine.capturing->add(op);
    py::gil_scoped_release release;
    Context context{*engine.pool, *engine.kernels};
    op.run(context);
}

// Ops index parts by node, so a matrix works only on pools of as many nodes as it was made for.
const SplitMatrix& fitting(const SplitMatrix& w) {
    if (static_cast<int>(w.parts.size()) == engine.pool->nodes()) return w;
    throw std::logic_error("a matrix made for " + std::to_string(w.parts.size()) + " NUMA nodes meets an engine on " +
                           std::to_string(engine.pool->nodes()));
}

// Keeps a Python object alive from C++, wherever that lets go of it.
std::shared_ptr<void> kept(const py::object& object) {
    return {new py::object(object), [](void* held) {
                py::gil_scoped_acquire acquire;
                delete static_cast<py::object*>(held);
            }};
}

Matrix matrix(int format, int64_t n, int64_t k, int64_t group, uintptr_t quants, uintptr_t scales, uintptr_t zeros) {
    Matrix w;
    w.format = static_cast<Format>(format);
    w.n = static_cast<int32_t>(n);
    w.k = static_cast<int32_t>(k);
    w.group = static_cast<int32_t>(group);
    w.quants = at<const uint8_t>(quants);
    w.scales = at<const uint16_t>(scales);
    w.zeros = at<const uint8_t>(zeros);
    return w;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    py::class_<Matrix>(m, "Matrix")
        .def(py::init(&matrix), py::arg("format"), py::arg("n"), py::arg("k"), py::arg("group"), py::arg("quants"),
             py::arg("scales"), py::arg("zeros"));
    py::class_<SplitMatrix>(m, "SplitMatrix").def(py::init<std::vector<Matrix>>());
    m.def("pack_rows", [](const SplitMatrix& w, int64_t index, int64_t first, int64_t step, int64_t count,
                          uintptr_t rows) {
        py::gil_scoped_release release;
        Context context{*engine.pool, *engine.kernels};
        pack_rows(context, w, {index, first, step}, count, at<const float>(rows));
    });
    m.def("pack_levels", [](const SplitMatrix& w, int64_t index, int64_t first, int64_t step, int64_t count,
                            uintptr_t levels, uintptr_t scales, uintptr_t zeros) {
        py::gil_scoped_release release;
        Context context{*engine.pool, *engine.kernels};
        pack_levels(context, w, {index, first, step}, count, at<const uint8_t>(levels), at<const uint16_t>(scales),
                    at<const uint8_t>(zeros));
    });
    m.def("unpack_rows", [](const SplitMatrix& w, int64_t index, int64_t first, int64_t step, int64_t count,
                            uintptr_t rows) {
        py::gil_scoped_release release;
        Context context{*engine.pool, *engine.kernels};
        unpack_rows(context, w, {index, first, step}, count, at<float>(rows));
    });

    py::class_<Node>(m, "Node").def_readonly("memory", &Node::memory).def_readonly("cores", &Node::cores);
    py::class_<Team>(m, "Team")
        .def(py::init<int, int, std::vector<int>>(), py::arg("memory"), py::arg("threads"), py::arg("cpus"))
        .def_readonly("memory", &Team::memory)
        .def_readonly("threads", &Team::threads)
        .def_readonly("cpus", &Team::cpus);
    m.def("allowed_cpus", &allowed_cpus);
    m.def("read_nodes", &read_nodes);
    m.def("share", &share);
    m.def("plan", &plan);
    m.def("divide", &divide);

    m.def("instruction_sets", &usable_sets);
    m.def("teams", [] { return engine.teams; });
    m.def("start", [](const std::vector<Team>& teams, const std::string& instruction_set) {
        const Kernels& kernels = choose_kernels(instruction_set);
        engine.pool.reset();
        engine.pool = std::make_unique<Pool>(teams);
        engine.teams = teams;
        engine.kernels = &kernels;
        return std::string(kernels.name);
    });

    py::class_<Tape, std::shared_ptr<Tape>>(m, "Tape")
        .def(py::init<>())
        .def("__len__", &Tape::size)
        .def("begin", [](Tape& tape) { engine.capturing = &tape; })
        .def("end", [](Tape&) { engine.capturing = nullptr; })
        .def("replay", [](const Tape& tape) {
            py::gil_scoped_release release;
            Context context{*engine.pool, *engine.kernels};
            tape.replay(context);
        });

    m.def("host", [](const py::function& function) { submit(HostNode{function}); });

    // Where each team's part of `count` rows, blocks or groups of them begins; the end of the last one too.
    m.def("split", [](int count) {
        std::vector<int> firsts;
        for (int n = 0; n <= engine.pool->nodes(); n++) firsts.push_back(engine.pool->first(count, n));
        return firsts;
    });
    py::class_<Buffer>(m, "Buffer", py::buffer_protocol())
        .def(py::init([](int64_t bytes, int team) {
            const int memory = engine.teams.at(team).memory;
            auto buffer = std::make_unique<Buffer>(bytes, memory);
            if (memory >= 0 && !buffer->bound()) buffer->touch(*engine.pool, team);
            return buffer;
        }))
        .def(py::init([](int64_t bytes, const Team& team) {  // for a team that is not of the engine's pool
            auto buffer = std::make_unique<Buffer>(bytes, team.memory);
            if (team.memory >= 0 && !buffer->bound()) {
                Pool pool({team});
                buffer->touch(pool, 0);
            }
            return buffer;
        }))
        .def("__len__", &Buffer::size)
        .def_property_readonly("address", &Buffer::address)
        .def_property_readonly("bound", &Buffer::bound)
        .def_buffer([](Buffer& b) { return py::buffer_info(at<uint8_t>(b.address()), b.size()); });
    py::class_<ReadProbe>(m, "ReadProbe")
        .def(py::init([](int64_t bytes) {
            Context context{*engine.pool, *engine.kernels};
            return std::make_unique<ReadProbe>(context, bytes);
        }))
        .def("run", [](const ReadProbe& probe) {
            py::gil_scoped_release release;
            Context context{*engine.pool, *engine.kernels};
            return probe.run(context);
        });
    m.def("mac_probe", [](int64_t rounds) {
        py::gil_scoped_release release;
        Context context{*engine.pool, *engine.kernels};
        return mac_probe(context, rounds);
    });

    m.def("embedding", [](uintptr_t ids, uintptr_t table, uintptr_t out, int64_t tokens, int64_t vocabulary,
                          int64_t hidden, int64_t first_id, int type) {
        submit(Embedding{at<const int64_t>(ids), at<const void>(table), at<float>(out), tokens, vocabulary, hidden,
                         first_id, static_cast<Type>(type)});
    });
    m.def("rms_norm", [](uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t out, uintptr_t total,
                         int64_t tokens, int64_t heads, int64_t width, int64_t stride, float eps) {
        submit(RmsNorm{at<const float>(x), at<const float>(residual), at<const float>(weight), at<float>(out),
                       at<float>(total), tokens, heads, width, stride, eps});
    });
    m.def("rope", [](uintptr_t x, uintptr_t cos, uintptr_t sin, uintptr_t out, int64_t tokens, int64_t heads,
                     int64_t width, int64_t stride) {
        submit(Rope{at<const float>(x), at<const float>(cos), at<const float>(sin), at<float>(out), tokens, heads,
                    width, stride});
    });
    m.def("write_kv", [](uintptr_t k, uintptr_t v, uintptr_t k_cache, uintptr_t v_cache, uintptr_t slots,
                         int64_t tokens, int64_t heads, int64_t width, int64_t page_size, int64_t k_stride,
                         int64_t v_stride, int type) {
        submit(WriteKv{at<const float>(k), at<const float>(v), at<void>(k_cache), at<void>(v_cache),
                       at<const int64_t>(slots), tokens, heads, width, page_size, k_stride, v_stride,
                       static_cast<Type>(type)});
    });
    m.def("attention", [](uintptr_t q, uintptr_t k_cache, uintptr_t v_cache, uintptr_t block_tables,
                          uintptr_t query_starts, uintptr_t kv_lens, uintptr_t out, int64_t sequences, int64_t heads,
                          int64_t kv_heads, int64_t width, int64_t page_size, int64_t most_pages, int64_t tokens,
                          float scale, int type) {
        submit(Attention{at<const float>(q), at<const void>(k_cache), at<const void>(v_cache),
                         at<const int64_t>(block_tables), at<const int64_t>(query_starts), at<const int64_t>(kv_lens),
                         at<float>(out), sequences, heads, kv_heads, width, page_size, most_pages, tokens, scale,
                         static_cast<Type>(type)});
    });
    m.def("silu_mul", [](uintptr_t x, uintptr_t out, int64_t tokens, int64_t width) {
        submit(SiluMul{at<const float>(x), at<float>(out), tokens, width});
    });
    m.def("route", [](uintptr_t logits, uintptr_t bias, uintptr_t weights, uintptr_t ids, uintptr_t scratch,
                      int64_t tokens, int64_t experts, int64_t k, bool sigmoid, bool renormalise) {
        submit(Route{at<const float>(logits), at<const float>(bias), at<float>(weights), at<int64_t>(ids),
                     at<float>(scratch), tokens, experts, k, sigmoid, renormalise});
    });
    m.def("argmax_chunks", &Argmax::chunks);
    m.def("argmax", [](uintptr_t x, uintptr_t out, uintptr_t best, int64_t rows, int64_t width) {
        submit(Argmax{at<const float>(x), at<int64_t>(out), at<int32_t>(best), rows, width});
    });
    m.attr("most_width") = kMostWidth;
    m.def("linear_scratch", [](int64_t tokens, int64_t k) { return Scratch::bytes(tokens, k); });
    m.def("linear", [](const SplitMatrix& w, uintptr_t x, uintptr_t bias, uintptr_t out, uintptr_t scratch,
                       int64_t tokens, int64_t n) {
        submit(Linear{fitting(w), at<const float>(x), at<const float>(bias), at<float>(out),
                      Scratch{at<uint8_t>(scratch)}, tokens, n});
    });
    m.def("moe_scratch", &Moe::scratch_bytes);
    m.def("moe", [](const SplitMatrix& w13, const SplitMatrix& w2, uintptr_t x, uintptr_t weights, uintptr_t ids,
                    uintptr_t out, uintptr_t scratch, int64_t tokens, int64_t k, int64_t experts,
                    int64_t first_expert, int64_t hidden, int64_t inner) {
        submit(Moe{fitting(w13), fitting(w2), at<const float>(x), at<const float>(weights), at<const int64_t>(ids),
                   at<float>(out), at<uint8_t>(scratch), tokens, k, experts, first_expert, hidden, inner});
    });
    m.def("moe_rows", [](const MoeRows& rows) {
        fitting(rows.w13), fitting(rows.w2);
        submit(rows);
    });

    py::register_exception<ShadowError>(m, "ShadowError", py::module_::import("errors").attr("UserError"));
    py::class_<MoeRows>(m, "MoeRows")
        .def(py::init([](const SplitMatrix& w13, const SplitMatrix& w2, uintptr_t address, uintptr_t elsewhere,
                         uintptr_t x, uintptr_t ids, uintptr_t rows, uintptr_t scratch, int64_t tokens, int64_t k,
                         int64_t experts, int64_t first_expert, int64_t hidden, int64_t inner) {
            return MoeRows{w13, w2, at<const int64_t>(address), at<const int64_t>(elsewhere), at<const float>(x),
                           at<const int64_t>(ids), at<float>(rows), at<uint8_t>(scratch), tokens, k, experts,
                           first_expert, hidden, inner};
        }));
    py::class_<ShadowWork, std::shared_ptr<ShadowWork>>(m, "ShadowWork")
        .def(py::init([](const MoeRows& rows, int64_t layer, uintptr_t step, const py::object& keep) {
            return std::make_shared<ShadowWork>(rows, layer, at<const int64_t>(step), kept(keep));
        }));
    py::class_<ShadowPool, std::shared_ptr<ShadowPool>>(m, "ShadowPool")
        .def(py::init([](const std::vector<Team>& teams, double timeout) {
            return std::make_shared<ShadowPool>(teams, *engine.kernels, timeout);
        }))
        .def("split", &ShadowPool::split)
        .def("stop", &ShadowPool::stop);
    m.def("submit", [](const std::shared_ptr<ShadowPool>& pool, const std::shared_ptr<ShadowWork>& work,
                       uintptr_t counts) { submit(Submit{pool, work, at<int64_t>(counts)}); });
    m.def("join", [](const std::shared_ptr<ShadowPool>& pool, const std::shared_ptr<ShadowWork>& work,
                     uintptr_t weights, uintptr_t out, uintptr_t times) {
        const MoeRows& rows = work->rows;
        submit(Join{pool, work,
                    {rows.rows, at<const float>(weights), rows.ids, at<float>(out), rows.tokens, rows.k, rows.experts,
                     rows.first_expert, rows.hidden},
                    at<int64_t>(times)});
    });
    py::class_<Worker>(m, "Worker")
        .def(py::init<std::shared_ptr<ShadowPool>>())
        .def("add", [](Worker& worker, const MoeRows& rows, int64_t layer, int type, uintptr_t live, uintptr_t counts,
                       uintptr_t times, const py::object& keep) {
            worker.add(std::make_shared<JobWork>(rows, layer, kept(keep), static_cast<Type>(type), at<uint8_t>(live),
                                                 at<int64_t>(counts), at<int64_t>(times)));
        })
        .def_property_readonly("context", [](Worker& worker) { return reinterpret_cast<uintptr_t>(&worker); })
        .def_property_readonly("submit", [](Worker&) { return reinterpret_cast<uintptr_t>(&Worker::submit); });
    py::class_<Copier>(m, "Copier")
        .def(py::init<std::vector<int>>())
        .def("submit", [](Copier& copier, uintptr_t to, uintptr_t from,
                          const std::vector<std::array<int64_t, 3>>& pieces) {
            std::vector<Piece> of;
            for (const auto& piece : pieces) of.push_back({piece[0], piece[1], piece[2]});
            return copier.submit(at<void>(to), at<const void>(from), std::move(of));
        })
        .def("done", &Copier::done)
        .def("wait", &Copier::wait, py::call_guard<py::gil_scoped_release>())
        .def("stop", &Copier::stop);
}
