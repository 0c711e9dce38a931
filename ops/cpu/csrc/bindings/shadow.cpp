// The shadow pool, the worker of Ascend's bridge, and the copier.

#include <array>

#include "bindings/engine.h"
#include "shadow/copier.h"
#include "shadow/worker.h"

namespace py = pybind11;

namespace umbra {
namespace {

// Keeps a Python object alive from C++; whichever thread drops the last reference takes the GIL for it.
std::shared_ptr<void> kept(const py::object& object) {
    return {new py::object(object), [](void* held) {
                py::gil_scoped_acquire acquire;
                delete static_cast<py::object*>(held);
            }};
}

}  // namespace

void bind_shadow(py::module_& m) {
    py::register_exception<ShadowError>(m, "ShadowError", py::module_::import("umbra.base.errors").attr("UserError"));
    py::class_<ShadowWork, std::shared_ptr<ShadowWork>>(m, "ShadowWork")
        .def(py::init([](const MoeRows& rows, int64_t layer, uintptr_t step, const py::object& keep) {
                 return new ShadowWork(rows, layer, at<const int64_t>(step), kept(keep));
             }),
             py::arg("rows"), py::arg("layer"), py::arg("step"), py::arg("keep"));
    py::class_<ShadowPool, std::shared_ptr<ShadowPool>>(m, "ShadowPool")
        .def(py::init([](const std::vector<Team>& teams, double timeout) {
                 return new ShadowPool(teams, *engine.kernels, timeout);
             }),
             py::arg("teams"), py::arg("timeout"))
        .def("split", &ShadowPool::split, py::arg("count"))
        .def("stop", &ShadowPool::stop);
    m.def(
        "submit",
        [](const std::shared_ptr<ShadowPool>& pool, const std::shared_ptr<ShadowWork>& work, uintptr_t counts,
           uintptr_t hits, uintptr_t arrived) {
            submit(Submit{pool, work, at<int64_t>(counts), at<int64_t>(hits), at<std::atomic<int64_t>>(arrived)});
        },
        py::arg("pool"), py::arg("work"), py::arg("counts"), py::arg("hits"), py::arg("arrived"));
    m.def(
        "join",
        [](const std::shared_ptr<ShadowPool>& pool, const std::shared_ptr<ShadowWork>& work, uintptr_t weights,
           uintptr_t out, uintptr_t times) {
            const MoeRows& rows = work->rows;
            submit(Join{pool,
                        work,
                        {rows.rows, at<const float>(weights), rows.ids, at<float>(out), rows.tokens, rows.k,
                         rows.experts, rows.first_expert, rows.hidden},
                        at<int64_t>(times)});
        },
        py::arg("pool"), py::arg("work"), py::arg("weights"), py::arg("out"), py::arg("times"));
    py::class_<Worker>(m, "Worker")
        .def(py::init<std::shared_ptr<ShadowPool>>(), py::arg("pool"))
        .def(
            "add",
            [](Worker& worker, const MoeRows& rows, int64_t layer, int type, uintptr_t live, uintptr_t counts,
               uintptr_t hits, uintptr_t times, const py::object& keep) {
                worker.add(std::make_shared<JobWork>(rows, layer, kept(keep), static_cast<Type>(type),
                                                     at<uint8_t>(live), at<int64_t>(counts), at<int64_t>(hits),
                                                     at<int64_t>(times)));
            },
            py::arg("rows"), py::arg("layer"), py::arg("type"), py::arg("live"), py::arg("counts"), py::arg("hits"),
            py::arg("times"), py::arg("keep"))
        .def_property_readonly("context", [](Worker& worker) { return reinterpret_cast<uintptr_t>(&worker); })
        .def_property_readonly("submit", [](Worker&) { return reinterpret_cast<uintptr_t>(&Worker::submit); });
    py::class_<Copier>(m, "Copier")
        .def(py::init<std::vector<int>>(), py::arg("cpus"))
        .def(
            "submit",
            [](Copier& copier, uintptr_t to, uintptr_t source, const std::vector<std::array<int64_t, 3>>& pieces,
               uintptr_t arrived) {
                std::vector<Piece> of;
                for (const auto& piece : pieces) of.push_back({piece[0], piece[1], piece[2]});
                return copier.submit(at<void>(to), at<const void>(source), std::move(of),
                                     at<std::atomic<int64_t>>(arrived));
            },
            py::arg("to"), py::arg("source"), py::arg("pieces"), py::arg("arrived"))
        .def("done", &Copier::done, py::arg("ticket"))
        .def("wait", &Copier::wait, py::arg("ticket"), py::call_guard<py::gil_scoped_release>())
        .def("stop", &Copier::stop);
}

}  // namespace umbra
