// Python's view of the native core. Thin: each binding hands over to the part that does the work.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>

#include "gil.h"

#include "bind_delegation.h"
#include "graph_runner.h"
#include "placeholder.h"
#include "program.h"
#include "session.h"
#include "walk.h"

namespace py = pybind11;

namespace terra {
namespace {

void Check(bool ok) {
  if (!ok) throw py::error_already_set();
}

py::tuple RegisterParts(py::capsule context, py::object fast_path_miss, py::object variable,
                        py::object recover) {
  static int device_info = 0;
  OutliveFinalization();
  Py_AtExit(&GraphRunner::StopAll);
  PythonParts& parts = Parts();
  parts.fast_path_miss = fast_path_miss.release().ptr();
  parts.variable = variable.release().ptr();
  parts.recover = recover.release().ptr();
  TFE_CustomDevice* device = InitDevice(static_cast<TFE_Context*>(context.get_pointer()));
  return py::make_tuple(py::capsule(device, "TFE_CustomDevice"),
                        py::capsule(&device_info, "TFE_CustomDevice_DeviceInfo"),
                        std::string(kDeviceName));
}

// (kind, index, object, feed, dtype, dims, bytes, items): see terra_tf/generation/program.py.
Arg ArgFromPython(Program* program, const py::tuple& spec) {
  Arg arg;
  arg.kind = static_cast<ArgKind>(spec[0].cast<int>());
  arg.index = spec[1].cast<int>();
  arg.object = program->Own(spec[2].ptr());
  arg.feed = spec[3].cast<int>();
  arg.dtype = spec[4].cast<int>();
  arg.dims = spec[5].cast<std::vector<int64_t>>();
  arg.bytes = spec[6].cast<std::string>();
  if (arg.kind == ArgKind::kSelect) {
    arg.known.resize(arg.bytes.size() / sizeof(int32_t));
    std::memcpy(arg.known.data(), arg.bytes.data(), arg.bytes.size());
  }
  for (py::handle item : spec[7].cast<py::tuple>()) {
    arg.items.push_back(ArgFromPython(program, item.cast<py::tuple>()));
  }
  return arg;
}

void CollectFeeds(const std::vector<Arg>& args, Node* node) {
  for (const Arg& arg : args) {
    CollectFeeds(arg.items, node);
    const bool takes = arg.kind == ArgKind::kFeed || arg.kind == ArgKind::kPythonFeed ||
                       arg.kind == ArgKind::kSelect;
    const int feed = takes ? arg.index : arg.kind == ArgKind::kOutput ? arg.feed : -1;
    if (feed < 0) continue;
    node->feeds.push_back(feed);
    const bool open = std::any_of(arg.dims.begin(), arg.dims.end(), [](int64_t d) { return d < 0; });
    if (open) node->open_feeds.push_back(feed);
  }
}

void AddNode(Program& program, py::str op, int call, bool misses, bool fails, bool in_place, int boundary,
             const py::list& args, py::object gradient_attrs, py::object gradient_inputs,
             int first_output, int num_outputs, int result, std::vector<int> groups, int forward) {
  Node node;
  node.op = program.Own(op.ptr());
  node.call = static_cast<CallKind>(call);
  node.misses = misses;
  node.fails = fails;
  node.in_place = in_place;
  node.boundary = boundary;
  for (py::handle spec : args) node.args.push_back(ArgFromPython(&program, spec.cast<py::tuple>()));
  if (!gradient_attrs.is_none()) {
    node.gradient_attrs = program.Own(gradient_attrs.ptr());
    node.gradient_inputs = program.Own(gradient_inputs.ptr());
  }
  node.first_output = first_output;
  node.num_outputs = num_outputs;
  node.result = static_cast<ResultKind>(result);
  node.groups = std::move(groups);
  node.forward = forward;
  CollectFeeds(node.args, &node);
  program.outputs_before.push_back(program.made_in_place.size());
  if (num_outputs > 0) program.made_in_place.resize(first_output + num_outputs, in_place);
  program.nodes.push_back(std::move(node));
}

void AddOutput(Program& program, int dtype, bool static_shape, std::vector<int64_t> dims, int fetch,
               int gate, py::object known, bool by_values) {
  OutputSpec spec;
  spec.dtype = dtype;
  spec.static_shape = static_shape;
  spec.dims = std::move(dims);
  spec.fetch = fetch;
  spec.gate = gate;
  spec.by_values = by_values;
  if (!known.is_none()) spec.known = RefHandle(EagerTensor_Handle(known.ptr()));
  program.outputs->push_back(std::move(spec));
}

void AddBlock(Program& program, int start, int end, int taken_slot) {
  program.blocks.push_back({start, end, taken_slot});
  program.block_at.resize(program.nodes.size(), -1);
  if (start < end) program.block_at[start] = program.blocks.size() - 1;
}

void InferShapes(Program& program, int node, const std::string& node_def, py::object numbers) {
  program.nodes[node].shapes = ShapeFunction::Make(node_def);
  program.nodes[node].numbers = program.Own(numbers.ptr());
}

void FollowsFromShapes(Program& program, int node, int kind) {
  program.nodes[node].shape_value = static_cast<ShapeValue>(kind);
}

void AddBoundary(Program& program, int end, int gate_slot, int done_slot,
                 int resume_slot) {
  program.boundaries.push_back({end, gate_slot, done_slot, resume_slot});
}

void AddCapture(Program& program, py::object tensor) {
  program.captures.push_back(RefHandle(EagerTensor_Handle(tensor.ptr())));
  program.captured.insert(tensor.ptr());
  program.Own(tensor.ptr());
}

py::list BlockCounts(const Program& program) {
  py::list counts;
  for (const Block& block : program.blocks) {
    counts.append(py::make_tuple(block.start, block.end, block.taken_slot >= 0, block.taken,
                                 block.skipped));
  }
  return counts;
}

py::list DelegatedCalls(const Program& program) {
  py::list calls;
  for (const auto& [start, places] : program.delegations) {
    for (const DelegationPlace& place : places) {
      if (place.calls.empty()) continue;
      calls.append(py::make_tuple(py::reinterpret_borrow<py::object>(place.function),
                                  place.calls.front()->nodes));
    }
  }
  return calls;
}

py::list Spans(const std::vector<Timeline::Span>& spans) {
  py::list pairs;
  for (const Timeline::Span& span : spans) pairs.append(py::make_tuple(span.start, span.end));
  return pairs;
}

void BindTimeline(py::module_& m) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(m, "Timeline")
      .def_property_readonly("launched", &Timeline::launched)
      .def_property_readonly("started", &Timeline::started)
      .def_property_readonly("finished", &Timeline::finished)
      .def_property_readonly("graph_waits", [](Timeline& t) { return Spans(t.graph_waits()); })
      .def_property_readonly("python_waits", [](Timeline& t) { return Spans(t.python_waits()); });
}

void BindProgram(py::module_& m) {
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<>())
      .def("add_node", &AddNode)
      .def("add_output", &AddOutput)
      .def("add_boundary", &AddBoundary)
      .def("add_block", &AddBlock)
      .def("infer_shapes",
           [](Program& p, int node, py::bytes node_def, py::object numbers) {
             InferShapes(p, node, node_def, numbers);
           })
      .def("follows_from_shapes", &FollowsFromShapes)
      .def("add_capture", &AddCapture)
      // (start, end, optional, how often taken, how often skipped) per block.
      .def("block_counts", &BlockCounts)
      // (the function, the nodes of its call) per call that is delegated at present.
      .def("delegated_calls", &DelegatedCalls)
      .def_readwrite("num_feeds", &Program::num_feeds)
      .def_readwrite("num_slots", &Program::num_slots)
      .def_readwrite("checked_slot", &Program::checked_slot)
      .def_readwrite("function", &Program::function)
      .def_property("config", nullptr, [](Program& p, py::bytes config) { p.config = config; });
}

py::object Borrowed(PyObject* object) {
  return object == nullptr ? py::none() : py::reinterpret_borrow<py::object>(object);
}

void BindWalk(py::module_& m) {
  py::class_<Walk>(m, "Walk")
      .def(py::init([](std::shared_ptr<Program> program, py::object on_fallback) {
        return new Walk(std::move(program), on_fallback.ptr());
      }))
      .def("launch", [](Walk& w, GraphRunner* runner) { w.Launch(runner); })
      .def("end",
           [](Walk& w) {
             const bool as_recorded = w.End();
             if (PyErr_Occurred()) throw py::error_already_set();
             return as_recorded;
           })
      .def("fallback", [](Walk& w, const std::string& code) { Check(w.Fallback(code.c_str(), -1)); })
      .def("complete_boundaries", [](Walk& w) { Check(w.CompleteBoundaries()); })
      .def("stop_graph",
           [](Walk& w, const std::vector<int>& needed) { Check(w.StopGraph(needed)); })
      .def("made_before",
           [](Walk& w, int output) {
             PyObject* made = w.MadeBefore(output);
             Check(made != nullptr);
             return py::reinterpret_steal<py::object>(made);
           })
      .def("close", &Walk::Close)
      .def("alive", &Walk::Alive)
      .def("mark_recovered", [](Walk& w) { w.iteration->MarkRecovered(); })
      .def("leave_to_plain", [](Walk& w) { LeaveToPlain(&w); })
      .def("release", &Walk::Release)
      .def("wait_checked", [](Walk& w) { Check(w.WaitChecked()); })
      .def_property_readonly("cursor", &Walk::cursor)
      .def_property_readonly("base", &Walk::base)
      .def_property_readonly("launched", &Walk::launched)
      .def_property_readonly("awaited", [](Walk& w) { return w.iteration->Awaited(); })
      .def_property_readonly("path", [](Walk& w) { return w.path(); })
      .def("value", [](Walk& w, int output) { return Borrowed(w.value(output)); })
      .def("feed", [](Walk& w, int index) { return Borrowed(w.feed(index)); })
      .def("make", [](Walk& w, int k, py::object function,
                      py::tuple args) { Check(w.Make(k, function.ptr(), args.ptr())); })
      .def("take_finished",
           [](Walk& w, bool wait) {
             std::vector<int> there;
             Check(w.TakeFinished(wait, &there));
             return there;
           })
      .def("interrupt", &Walk::Interrupt)
      .def_property_readonly("id", [](Walk& w) { return w.iteration->id; })
      .def_property_readonly("closed", [](Walk& w) { return w.iteration->closed.load(); })
      .def_property_readonly("finished", [](Walk& w) { return w.iteration->finished(); })
      .def_property_readonly("interrupted", [](Walk& w) { return w.iteration->interrupted(); })
      // Whether it is to be recovered; None while it runs. That it has ended is asked first: what
      // ends in between is looked at the next time.
      .def_property_readonly("is_due", [](Walk& w) -> py::object {
        if (w.iteration->interrupted()) return py::bool_(true);
        if (!w.iteration->finished()) return py::none();
        return py::bool_(!w.iteration->status().ok());
      })
      .def_property_readonly("failed",
                             [](Walk& w) {
                               return w.iteration->finished() && !w.iteration->status().ok();
                             })
      .def_property_readonly(
          "status", [](Walk& w) { return std::string(w.iteration->status().message()); })
      .def("wait_finished",
           [](Walk& w, int milliseconds) {
             std::shared_ptr<Iteration> iteration = w.iteration;
             WithoutGil unlocked;
             return iteration->WaitFinished(milliseconds);
           })
      .def_property_readonly("timeline", [](Walk& w) { return w.iteration->timeline; })
      .def_readonly("python_wait_seconds", &Walk::python_wait_seconds)
      .def_property_readonly("graph_wait_seconds",
                             [](Walk& w) { return w.iteration->graph_wait_seconds(); })
      .def_readonly("feeds_sent", &Walk::feeds_sent)
      .def_readonly("fetches_read", &Walk::fetches_read)
      .def_readonly("delegated_calls", &Walk::delegated_calls);
  py::class_<GraphRunner>(m, "GraphRunner")
      .def(py::init([] { return new GraphRunner(Context()); }));

}

void BindSession(py::module_& m) {
  m.def("enter_plain", [] { SetMode(Mode::kPlain, nullptr, nullptr); });
  m.def("enter_record", [](py::object recorder) {
    SetMode(Mode::kRecord, nullptr, recorder.ptr());
    return CurrentSession().recording;
  });
  m.def("enter_walk", [](Walk& walk) { SetMode(Mode::kWalk, &walk, nullptr); });
  m.def("leave", [] {
    SetMode(Mode::kOutside, nullptr, nullptr);
    FreeRetired();
  });
  m.def("any_shared", &AnyShared);
  m.def("is_shared", [](py::object handle) { return IsShared(handle.ptr()); });
  m.def("inside", [] {
    const Session& session = CurrentSession();
    return session.mode != Mode::kOutside || session.suspended > 0 || session.calling > 0;
  });
  m.def("executes_asynchronously", [] {
    TFE_Executor* executor = TFE_ContextGetExecutorForThread(Context());
    const bool is_async = TFE_ExecutorIsAsync(executor);
    TFE_DeleteExecutor(executor);
    return is_async;
  });
  m.def("in_region", [] { return CurrentSession().mode != Mode::kOutside; });
  m.def("forget_all", &GraphRunner::ForgetAll);
  m.def("suspended", [] { return CurrentSession().suspended > 0; });
  m.def("suspend", [] { ++CurrentSession().suspended; });
  m.def("resume", [] { --CurrentSession().suspended; });
  m.def("op_calls", [] { return CurrentSession().calls; });
  m.def("tell_waits", [](py::object waited) { Parts().waited = waited.release().ptr(); });
  m.def("sync_closed", [] { Check(SyncClosed()); });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "terra_tf's native core: placeholders, matcher, slots, GraphRunner.";
  m.attr("built_for_tensorflow") = TERRA_BUILT_FOR_TF;
  m.def("register_parts", &RegisterParts);
  m.def("find_handle_offset", [](py::object tensor) { return FindHandleOffset(tensor.ptr()); });
  m.def("is_placeholder", [](py::object tensor) { return AsPlaceholder(tensor.ptr()) != nullptr; });
  m.def("recorded_output", [](py::object tensor) {
    Placeholder* placeholder = AsPlaceholder(tensor.ptr());
    const bool current =
        placeholder != nullptr && placeholder->recording == CurrentSession().recording;
    return current && placeholder->recording != 0 ? placeholder->output : -1;
  });
  m.def("look", [](py::object tensor) {
    ++CurrentSession().looks;
    Check(Materialise(tensor.ptr()));
  });
  m.def("materialise", [](py::object tensor) { Check(Materialise(tensor.ptr())); });
  m.attr("Hook") = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(HookType()));
  BindTimeline(m);
  BindProgram(m);
  BindWalk(m);
  BindSession(m);
  BindDelegation(m);
}

}  // namespace terra
