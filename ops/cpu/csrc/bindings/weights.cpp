// Weight matrices, the memory they lie in, and how rows get into and out of them.

#include <string>

#include "bindings/engine.h"
#include "kernels/pack.h"
#include "kernels/records.h"
#include "runtime/buffer.h"

namespace py = pybind11;

namespace umbra {

const SplitMatrix& fitting(const SplitMatrix& w) {
    if (static_cast<int>(w.parts.size()) != engine.pool->nodes())
        throw std::logic_error("a matrix made for " + std::to_string(w.parts.size()) +
                               " NUMA nodes meets an engine on " + std::to_string(engine.pool->nodes()));
    if (w.like().order != engine.kernels->order)
        throw std::logic_error(std::string("a matrix made for another instruction set meets ") + engine.kernels->name);
    return w;
}

void bind_weights(py::module_& m) {
    m.def(
        "format_names",
        [] {
            std::vector<std::string> names;
            for (const FormatTraits& format : kFormatTraits) names.emplace_back(format.name);
            return names;
        },
        "The formats that kernels multiply, by their numbers.");
    m.def(
        "set_grid",
        [](int format, uintptr_t entries, int64_t count) {
            set_grid(traits_of(static_cast<Format>(format)).record, at<const int8_t>(entries), count);
        },
        py::arg("format"), py::arg("entries"), py::arg("count"),
        "Sets the grid of a format of records: entries of 4 or 8 signed bytes.");
    py::class_<Matrix>(m, "Matrix")
        .def(py::init([](int format, int64_t n, int64_t k, int64_t group, uintptr_t quants, uintptr_t scales,
                         uintptr_t zeros, uintptr_t bias) {
                 Matrix w;
                 w.format = static_cast<Format>(format);
                 w.order = engine.kernels->order;
                 w.n = static_cast<int32_t>(n);
                 w.k = static_cast<int32_t>(k);
                 w.group = static_cast<int32_t>(group);
                 w.quants = at<const uint8_t>(quants);
                 w.scales = at<const uint16_t>(scales);
                 w.zeros = at<const uint8_t>(zeros);
                 w.bias = at<const float>(bias);
                 return w;
             }),
             py::arg("format"), py::arg("n"), py::arg("k"), py::arg("group"), py::arg("quants"), py::arg("scales"),
             py::arg("zeros"), py::arg("bias") = 0);
    py::class_<SplitMatrix>(m, "SplitMatrix").def(py::init<std::vector<Matrix>>(), py::arg("parts"));

    py::class_<Table>(m, "Table")
        .def(py::init([](uintptr_t address, int kind, int64_t row, int64_t step) {
                 return Table{at<const uint8_t>(address), static_cast<Kind>(kind), row, step};
             }),
             py::arg("address"), py::arg("kind"), py::arg("row"), py::arg("step"));
    py::class_<Given>(m, "Given")
        .def(py::init([](const Table& values, const Table& scales, const Table& zeros, int64_t group, int middle,
                         const Table& of_scales, const Table& of_zeros) {
                 return Given{values, scales, zeros, group, middle, of_scales, of_zeros};
             }),
             py::arg("values"), py::arg("scales"), py::arg("zeros"), py::arg("group"), py::arg("middle"),
             py::arg("of_scales"), py::arg("of_zeros"), "Ordinary rows.")
        .def(py::init([](uintptr_t address, int type, int64_t row, int64_t skipped, float factor) {
                 Given given;
                 given.blocks = {at<const uint8_t>(address), static_cast<Ggml>(type), row, skipped, factor};
                 return given;
             }),
             py::arg("address"), py::arg("type"), py::arg("row"), py::arg("skipped"), py::arg("factor"),
             "Rows of blocks.");
    m.def(
        "pack_rows",
        [](const SplitMatrix& w, int64_t index, int64_t first, int64_t step, int64_t count, int64_t columns,
           const Given& given, bool keep) {
            py::gil_scoped_release release;
            Context context = engine.context();
            return pack_rows(context, w, {index, first, step}, count, columns, given, keep);
        },
        py::arg("w"), py::arg("index"), py::arg("first"), py::arg("step"), py::arg("count"), py::arg("columns"),
        py::arg("given"), py::arg("keep"));
    m.def(
        "fill_table",
        [](uintptr_t to, int type, int64_t rows, int64_t columns, const Given& given) {
            py::gil_scoped_release release;
            Context context = engine.context();
            return fill_table(context, at<void>(to), static_cast<Type>(type), rows, columns, given);
        },
        py::arg("to"), py::arg("type"), py::arg("rows"), py::arg("columns"), py::arg("given"));
    m.def(
        "unpack_rows",
        [](const SplitMatrix& w, int64_t index, int64_t first, int64_t step, int64_t count, uintptr_t rows) {
            py::gil_scoped_release release;
            Context context = engine.context();
            unpack_rows(context, w, {index, first, step}, count, at<float>(rows));
        },
        py::arg("w"), py::arg("index"), py::arg("first"), py::arg("step"), py::arg("count"), py::arg("rows"));

    m.def(
        "split",
        [](int count) {
            std::vector<int> firsts;
            for (int n = 0; n <= engine.pool->nodes(); n++) firsts.push_back(engine.pool->first(count, n));
            return firsts;
        },
        py::arg("count"), "Where each team's part of `count` things begins, and the end of the last part.");
    py::class_<Buffer>(m, "Buffer", py::buffer_protocol())
        .def(py::init([](int64_t bytes, int team) {
                 const int memory = engine.teams.at(team).memory;
                 auto buffer = std::make_unique<Buffer>(bytes, memory);
                 if (memory >= 0 && !buffer->bound()) buffer->touch(*engine.pool, team);
                 return buffer.release();
             }),
             py::arg("bytes"), py::arg("team"), "Memory near a team of the engine's pool, by its number.")
        .def(py::init([](int64_t bytes, const Team& team) {
                 auto buffer = std::make_unique<Buffer>(bytes, team.memory);
                 if (team.memory >= 0 && !buffer->bound()) {
                     Pool pool({team});
                     buffer->touch(pool, 0);
                 }
                 return buffer.release();
             }),
             py::arg("bytes"), py::arg("team"), "Memory near a team of another pool.")
        .def(py::init([](int64_t bytes, const std::vector<Team>& teams) {
                 std::vector<int> memory;
                 for (const Team& team : teams) memory.push_back(team.memory);
                 return new Buffer(bytes, memory);
             }),
             py::arg("bytes"), py::arg("teams"), "Memory whose pages lie near the teams of a pool in turn.")
        .def("__len__", &Buffer::size)
        .def_property_readonly("address", &Buffer::address)
        .def_property_readonly("bound", &Buffer::bound)
        .def_property_readonly("local", &Buffer::local)
        .def(
            "map",
            [](Buffer& b, const std::string& path, int64_t bytes) {
                py::gil_scoped_release release;
                return bytes <= b.size() ? b.map(path, bytes) : EINVAL;
            },
            py::arg("path"), py::arg("bytes"))
        .def("renew", &Buffer::renew)
        .def(
            "read",
            [](Buffer& b, const std::string& path, int64_t bytes) {
                py::gil_scoped_release release;
                return bytes <= b.size() ? b.read(path, bytes, *engine.pool) : EINVAL;
            },
            py::arg("path"), py::arg("bytes"))
        .def_buffer([](Buffer& b) { return py::buffer_info(at<uint8_t>(b.address()), b.size()); });
}

}  // namespace umbra
