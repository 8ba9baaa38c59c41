#include "bind_delegation.h"

#include <pybind11/stl.h>

#include <string>

#include "delegation.h"
#include "library.h"
#include "session.h"
#include "tape.h"
#include "walk.h"

namespace py = pybind11;

namespace terra {
namespace {

std::unique_ptr<Same> MakeSame(py::handle object) { return std::make_unique<Same>(object.ptr()); }

// See terra_tf/delegation/patterns.py.
Pattern ReadPattern(py::handle object) {
  const py::tuple spec = py::reinterpret_borrow<py::tuple>(object);
  const std::string kind = spec[0].cast<std::string>();
  Pattern pattern;
  auto read_named = [&](py::handle pairs) {
    for (py::handle pair : pairs) {
      const py::tuple named = py::reinterpret_borrow<py::tuple>(pair);
      pattern.named.emplace_back(py::reinterpret_borrow<py::object>(named[0]), ReadPattern(named[1]));
    }
  };
  if (kind == "tensor") {
    pattern.kind = Pattern::Kind::kTensor;
    pattern.leaf = spec[1].cast<int>();
    const std::string source = spec[2].cast<std::string>();
    pattern.source = source == "output" ? Pattern::Source::kOutput
                     : source == "feed" ? Pattern::Source::kFeed
                                        : Pattern::Source::kAny;
    pattern.index = spec[3].cast<int>();
    pattern.dtype = spec[4].cast<int>();
    pattern.sized = !spec[5].is_none();
    if (pattern.sized) pattern.dims = spec[5].cast<std::vector<int64_t>>();
    read_named(spec[6]);
  } else if (kind == "value") {
    pattern.kind = Pattern::Kind::kValue;
    pattern.value = MakeSame(spec[1]);
  } else if (kind == "sequence") {
    pattern.kind = Pattern::Kind::kSequence;
    pattern.value = MakeSame(spec[1]);
    for (py::handle item : spec[2]) pattern.items.push_back(ReadPattern(item));
  } else if (kind == "mapping") {
    pattern.kind = Pattern::Kind::kMapping;
    read_named(spec[1]);
  } else if (kind == "instance") {
    pattern.kind = Pattern::Kind::kInstance;
    pattern.value = MakeSame(spec[1]);
    read_named(spec[2]);
  } else if (kind == "tape") {
    pattern.kind = Pattern::Kind::kTape;
    pattern.index = spec[1].cast<int>();
  } else {
    throw py::value_error("unknown pattern " + kind);
  }
  return pattern;
}

Recipe ReadRecipe(py::handle object) {
  const py::tuple spec = py::reinterpret_borrow<py::tuple>(object);
  const std::string kind = spec[0].cast<std::string>();
  Recipe recipe;
  auto read_items = [&](py::handle items) {
    for (py::handle item : items) recipe.items.push_back(ReadRecipe(item));
  };
  if (kind == "leaf" || kind == "output") {
    recipe.kind = kind == "leaf" ? Recipe::Kind::kLeaf : Recipe::Kind::kOutput;
    recipe.index = spec[1].cast<int>();
    if (kind == "leaf") return recipe;
    for (py::handle pair : spec[2]) {
      const py::tuple named = py::reinterpret_borrow<py::tuple>(pair);
      recipe.attributes.emplace_back(py::reinterpret_borrow<py::object>(named[0]),
                                     ReadRecipe(named[1]));
    }
  } else if (kind == "value") {
    recipe.kind = Recipe::Kind::kValue;
    recipe.value = MakeSame(spec[1]);
    // A constant that the call has made, which nobody else may hold.
    if (EagerTensor_CheckExact(spec[1].ptr())) {
      recipe.keys.push_back(py::reinterpret_borrow<py::object>(spec[1]));
    }
  } else if (kind == "sequence" || kind == "make") {
    recipe.kind = kind == "make" ? Recipe::Kind::kMake : Recipe::Kind::kSequence;
    recipe.value = MakeSame(spec[1]);
    if (kind == "make") recipe.keys.push_back(py::reinterpret_borrow<py::object>(spec[1]));
    read_items(spec[2]);
  } else if (kind == "mapping") {
    recipe.kind = Recipe::Kind::kMapping;
    for (py::handle key : spec[1]) recipe.keys.push_back(py::reinterpret_borrow<py::object>(key));
    read_items(spec[2]);
  } else {
    throw py::value_error("unknown recipe " + kind);
  }
  return recipe;
}

// Feeds of each of some nodes: [(position among the nodes, feed)], each feed once.
std::vector<std::pair<int, int>> FeedsOf(const Walk& walk, const std::vector<int>& nodes) {
  std::vector<std::pair<int, int>> found;
  std::vector<char> seen(walk.program->num_feeds, false);
  for (size_t i = 0; i < nodes.size(); ++i) {
    for (int feed : walk.program->nodes[nodes[i]].feeds) {
      if (!seen[feed]) found.emplace_back(i, feed);
      seen[feed] = true;
    }
  }
  return found;
}

CallFeed ReadFeed(const Program& program, const std::vector<int>& nodes, py::handle object) {
  const py::tuple spec = py::reinterpret_borrow<py::tuple>(object);
  CallFeed feed;
  feed.at = spec[0].cast<int>();
  feed.feed = spec[1].cast<int>();
  const std::string source = spec[2].cast<std::string>();
  if (source == "value") {
    feed.source = CallFeed::Source::kValue;
    feed.value = py::reinterpret_borrow<py::object>(spec[3]);
  } else {
    feed.source = source == "leaf" ? CallFeed::Source::kLeaf : CallFeed::Source::kOutput;
    feed.index = spec[3].cast<int>();
  }
  feed.arg = FindFeed(program.nodes[nodes[feed.at]].args, feed.feed);
  if (feed.arg == nullptr) throw py::value_error("no such feed among the nodes' arguments");
  return feed;
}

void Learn(Walk& walk, int cursor, py::object function, py::dict spec) {
  auto call = std::make_unique<DelegatedCall>();
  for (py::handle pattern : spec["arguments"]) call->arguments.push_back(ReadPattern(pattern));
  for (py::handle pair : spec["keywords"]) {
    const py::tuple named = py::reinterpret_borrow<py::tuple>(pair);
    call->keywords.emplace_back(py::reinterpret_borrow<py::object>(named[0]), ReadPattern(named[1]));
  }
  call->taped = spec["taped"].cast<bool>();
  std::vector<PyObject*> leaves;
  for (py::handle leaf : spec["leaves"]) leaves.push_back(leaf.ptr());
  call->leaves = leaves.size();
  call->aliases = spec["aliases"].cast<std::vector<int>>();
  call->state = spec["state"].cast<std::shared_ptr<State>>();
  call->nodes = spec["nodes"].cast<std::vector<int>>();
  call->needs_feeds = spec["needs_feeds"].cast<std::vector<int>>();
  for (py::handle feed : spec["feeds"]) {
    call->feeds.push_back(ReadFeed(*walk.program, call->nodes, feed));
  }
  for (py::handle feed : spec["feeds_on_the_way"]) {
    call->feeds_on_the_way.push_back(ReadFeed(*walk.program, call->nodes, feed));
  }
  for (py::handle item : spec["tape_steps"]) {
    const py::tuple parts = py::reinterpret_borrow<py::tuple>(item);
    call->tape_steps.push_back({parts[0].cast<int>(), static_cast<TapeAction>(parts[1].cast<int>()),
                                parts[2].is_none() ? nullptr : MakeSame(parts[2])});
  }
  if (!spec["tape"].is_none()) {
    call->tape = walk.TapeHistory(spec["tape"].cast<int>(), &call->tape_nodes);
    // The call's own nodes are not part of what came before it.
    const size_t size = spec["tape_nodes"].cast<size_t>();
    const size_t start = walk.sizes().size() - call->tape_nodes.size();
    call->tape_nodes.resize(size);
    call->tape_sizes.assign(walk.sizes().begin() + start, walk.sizes().begin() + start + size);
    call->tape.resize(spec["tape_events"].cast<size_t>());
  }
  if (!spec["after"].is_none()) call->after = py::reinterpret_borrow<py::object>(spec["after"]);
  call->result = ReadRecipe(spec["result"]);
  walk.Complete(call.get(), leaves);
  walk.Learned(cursor, function.ptr(), std::move(call), false);
}

void BindState(py::module_& m) {
  auto check = [](int entry) {
    if (entry < 0) throw py::error_already_set();
    return entry;
  };
  py::class_<State, std::shared_ptr<State>>(m, "State")
      .def(py::init<>())
      .def("add_object", [=](State& s, py::object x, bool transient, bool held) {
        return check(s.AddObject(x.ptr(), transient, held));
      })
      .def("add_local", [=](State& s, py::object x) { return check(s.AddLocal(x.ptr())); })
      .def("add_dict", [=](State& s, py::object x) { return check(s.AddDict(x.ptr())); })
      .def("add_sequence", [=](State& s, py::object x) { return check(s.AddSequence(x.ptr())); })
      .def("add_set", [=](State& s, py::object x) { return check(s.AddSet(x.ptr())); })
      .def("add_class", [=](State& s, py::object x) { return check(s.AddClass(x.ptr())); })
      .def("add_array", [=](State& s, py::object x) { return check(s.AddArray(x.ptr())); })
      .def("keep", [](State& s, py::object x) { s.Keep(x.ptr()); })
      .def("ignore", [](State& s, int entry, py::object key) { s.Ignore(entry, key.ptr()); })
      .def("set_transient", [](State& s, int parent, py::object key, int child) {
        s.SetTransient(parent, key.ptr(), child);
      })
      .def("set_transient_item", &State::SetTransientItem)
      .def("holds", &State::Holds)
      .def("__len__", &State::size)
      .def("difference", [](State& s) {
        PyObject* key = s.differing_key();
        return py::make_tuple(s.differs(), key == nullptr ? py::none()
                                                          : py::reinterpret_borrow<py::object>(key));
      });
}

}  // namespace

void BindDelegation(py::module_& m) {
  BindState(m);
  m.attr("LibraryCall") =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(LibraryCallType()));
  m.attr("OpFunction") =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(OpFunctionType()));
  m.attr("TapeHook") =
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(TapeHookType()));
  m.def("watch_module", [](py::dict module) { WatchModule(module.ptr()); });
  m.def("current_walk", []() -> Walk* { return CurrentSession().walk; },
        py::return_value_policy::reference);
  m.def("any_tape", [] { return TFE_Py_TapeSetIsEmpty() == Py_False; });
  m.def("learning_begins", [] { ++CurrentSession().learning; });
  m.def("learning_ends", [] { --CurrentSession().learning; });
  py::object walk = m.attr("Walk");
  auto& type = static_cast<py::class_<Walk>&>(walk);
  type.def("learn", &Learn)
      .def_readonly("looks", &Walk::looks)
      .def("not_learned", [](Walk& w, int cursor, py::object function, bool hopeless) {
        w.Learned(cursor, function.ptr(), nullptr, hopeless);
      })
      .def("own_output", [](Walk& w, py::object tensor) { return w.OwnOutput(tensor.ptr()); })
      .def("feed_of", [](Walk& w, py::object tensor) {
        for (size_t i = 0; i < w.feeds().size(); ++i) {
          if (w.feeds()[i] == tensor.ptr()) return static_cast<int>(i);
        }
        return -1;
      })
      .def("feeds_of", &FeedsOf)
      .def("bound_feeds", [](Walk& w) {
        std::vector<int> bound;
        for (size_t i = 0; i < w.feeds().size(); ++i) {
          if (w.feeds()[i] != nullptr) bound.push_back(i);
        }
        return bound;
      })
      .def("is_known", [](Walk& w, int o) {
        if ((*w.program->outputs)[o].known != nullptr) return true;
        for (const Node& node : w.program->nodes) {
          if (o < node.first_output + node.num_outputs) {
            return o >= node.first_output && node.shape_value != ShapeValue::kNone;
          }
        }
        return false;
      })
      .def("is_number", [](Walk& w, int k, int feed) {
        const Arg* arg = FindFeed(w.program->nodes[k].args, feed);
        return arg != nullptr && arg->kind == ArgKind::kPythonFeed;
      })
      .def("variable_at", [](Walk&, long long about) {
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(about));
      })
      .def("path_from", [](Walk& w, size_t start) {
        return std::vector<int>(w.path().begin() + start, w.path().end());
      })
      .def_property_readonly("path_length", [](Walk& w) { return w.path().size(); })
      .def("is_in_place", [](Walk& w, int k) { return w.program->nodes[k].in_place; })
      .def("is_static", [](Walk& w, int output) { return (*w.program->outputs)[output].static_shape; })
      .def("outputs_of", [](Walk& w, int k) {
        const Node& node = w.program->nodes[k];
        return py::make_tuple(node.first_output, node.first_output + node.num_outputs);
      })
      .def("known_shape", [](Walk&, py::object tensor) -> py::object {
        Placeholder* placeholder = AsPlaceholder(tensor.ptr());
        if (placeholder == nullptr || placeholder->real != nullptr) return py::none();
        const std::vector<int64_t>* dims = KnownDims(placeholder);
        return dims == nullptr ? py::object(py::bool_(false)) : py::cast(*dims);
      })
      .def("tape_number", [](Walk& w, py::object tape) { return w.TapeNumber(tape.ptr()); })
      .def("tape_events", [](Walk& w, int number) {
        std::vector<int> nodes;
        const size_t events = w.TapeHistory(number, &nodes).size();
        return py::make_tuple(events, nodes.size());
      })
      .def_property_readonly("events", [](Walk& w) {
        py::list events;
        for (const TapeEvent& e : w.tape_events()) {
          events.append(py::make_tuple(static_cast<int>(e.action), e.at, e.about));
        }
        return events;
      });
}

}  // namespace terra
