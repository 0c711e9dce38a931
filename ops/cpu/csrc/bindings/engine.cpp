// NUMA nodes and teams, starting the engine, tapes and probes.

#include "bindings/engine.h"

#include <cxxabi.h>
#include <malloc.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <typeinfo>
#include <utility>

#include "kernels/dispatch.h"
#include "runtime/probe.h"

namespace py = pybind11;

namespace umbra {

Engine engine;

namespace {

constexpr int kKept = 1 << 29;      // most bytes that are not given back to the system once they are free
constexpr int kOfHeap = 1 << 28;    // tensors of fewer bytes are made of such memory
constexpr int64_t kRoom = 1 << 18;  // floats for each thread: sums of 2,000 sections of 128 columns

// Python code at its place on the tape, where it may call ops: these run, and are not recorded themselves. An exception
// ends the capture or the replay and reaches its caller.
struct HostNode {
    py::function function;
    void run(Context&) const {
        py::gil_scoped_acquire acquire;
        Tape* capturing = std::exchange(engine.capturing, nullptr);
        function();
        engine.capturing = capturing;
    }
};

// What ends this process where memory is refused and no exception can reach Python, as where pybind11 registers a new
// object. Nothing is allocated then.
struct Ending {
    std::string line;
    int status;
    std::terminate_handler usual;
} ending;

[[noreturn]] void terminate() {
    const std::type_info* type = abi::__cxa_current_exception_type();
    if (type && *type == typeid(std::bad_alloc)) {
        [[maybe_unused]] const ssize_t said = write(STDERR_FILENO, ending.line.data(), ending.line.size());
        _exit(ending.status);
    }
    ending.usual();
    std::abort();
}

}  // namespace

void bind_engine(py::module_& m) {
    py::class_<Node>(m, "Node").def_readonly("memory", &Node::memory).def_readonly("cores", &Node::cores);
    py::class_<Team>(m, "Team")
        .def(py::init<int, int, std::vector<int>>(), py::arg("memory"), py::arg("threads"), py::arg("cpus"))
        .def_readonly("memory", &Team::memory)
        .def_readonly("threads", &Team::threads)
        .def_readonly("cpus", &Team::cpus);
    m.def(
        "end_without_memory",
        [](const std::string& line, int status) {
            ending.line = line;
            ending.status = status;
            if (!ending.usual) ending.usual = std::set_terminate(&terminate);
        },
        py::arg("line"), py::arg("status"));
    m.def("allowed_cpus", &allowed_cpus);
    m.def("read_nodes", &read_nodes, py::arg("root"), py::arg("allowed"));
    m.def("share", &share, py::arg("nodes"), py::arg("rank"), py::arg("ranks"));
    m.def("plan", &plan, py::arg("nodes"), py::arg("threads"));
    m.def("divide", &divide, py::arg("nodes"), py::arg("device"), py::arg("shadow"));

    m.def("instruction_sets", &usable_sets);
    m.def("teams", [] { return engine.teams; });
    m.def("order", [] { return static_cast<int>(engine.kernels->order); });
    m.def(
        "start",
        [](const std::vector<Team>& teams, const std::string& instruction_set, const std::vector<Team>& wide) {
            const Kernels& kernels = choose_kernels(instruction_set);
            // The tensors of a long step are made anew in each layer. An eighth of such a step went into page faults where
            // each of them was mapped and unmapped.
            mallopt(M_MMAP_THRESHOLD, kOfHeap);
            mallopt(M_TRIM_THRESHOLD, kKept);
            engine.widened = false;
            engine.pool.reset();  // first the pool that pinned this thread last
            engine.wide.reset();
            if (!wide.empty()) engine.wide = std::make_unique<Pool>(wide);
            engine.pool = std::make_unique<Pool>(teams);
            engine.teams = teams;
            engine.wide_teams = wide;
            engine.kernels = &kernels;
            engine.room.floats = engine.most_threads() * kRoom;
            engine.memory.reset(new float[engine.room.floats]);  // not zeroed: pages are had as they are used
            engine.room.memory = engine.memory.get();
            return std::string(kernels.name);
        },
        py::arg("teams"), py::arg("instruction_set"), py::arg("wide"));
    m.def(
        "widen",
        [](bool widened) {
            if (!engine.wide || engine.widened == widened) return;
            engine.widened = widened;
            if (const Team& own = (widened ? engine.wide_teams : engine.teams)[0]; !own.cpus.empty()) pin(own.cpus);
        },
        py::arg("widened"));

    py::class_<Tape, std::shared_ptr<Tape>>(m, "Tape")
        .def(py::init<>())
        .def("__len__", &Tape::size)
        .def("begin", [](Tape& tape) { engine.capturing = &tape; })
        .def("end", [](Tape&) { engine.capturing = nullptr; })
        .def("replay", [](const Tape& tape) {
            py::gil_scoped_release release;
            Context context = engine.context();
            tape.replay(context);
        });
    m.def("host", [](const py::function& function) { submit(HostNode{function}); }, py::arg("function"));

    py::class_<ReadProbe>(m, "ReadProbe")
        .def(py::init([](int64_t bytes) {
                 Context context = engine.context();
                 return new ReadProbe(context, bytes);
             }),
             py::arg("bytes"))
        .def("run", [](const ReadProbe& probe) {
            py::gil_scoped_release release;
            Context context = engine.context();
            return probe.run(context);
        });
    m.def(
        "mac_probe",
        [](int64_t rounds) {
            py::gil_scoped_release release;
            Context context = engine.context();
            return mac_probe(context, rounds);
        },
        py::arg("rounds"));
}

}  // namespace umbra
