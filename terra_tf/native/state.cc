#include "state.h"

#include <cstring>
#include <utility>

#include "guards.h"

// PEP 509's version tags are there up to Python 3.12, but marked as deprecated in it.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace terra {
namespace {

// The dictionary of an object's attributes (borrowed), or null.
PyObject* Attributes(PyObject* object) {
  PyObject** dict = _PyObject_GetDictPtr(object);
  return dict == nullptr ? nullptr : *dict;
}

unsigned ClassVersion(PyTypeObject* type) {
  return PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG) ? type->tp_version_tag : 0;
}

const uint64_t kZero = 0;

template <typename T>
const uint64_t* Address(const T* place) {
  static_assert(sizeof(T) == sizeof(uint64_t));
  return reinterpret_cast<const uint64_t*>(place);
}

const uint64_t* AddressOfVersion(PyObject* dict) {
  return Address(&reinterpret_cast<PyDictObject*>(dict)->ma_version_tag);
}

const uint64_t* AddressOfObject(PyObject* weak) {
  return Address(&reinterpret_cast<PyWeakReference*>(weak)->wr_object);
}

bool IsPlain(PyObject* x) {
  return x == Py_None || PyBool_Check(x) || PyLong_CheckExact(x) || PyFloat_CheckExact(x) ||
         PyComplex_CheckExact(x) || PyUnicode_CheckExact(x) || PyBytes_CheckExact(x);
}

PyObject* ArrayBytes(PyObject* array) { return PyObject_CallMethod(array, "tobytes", nullptr); }

}  // namespace

uint64_t DictVersion(PyObject* dict) {
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
}

Same::Same(PyObject* object) : object_(object) {
  if (!IsPlain(object) && PyType_SUPPORTS_WEAKREFS(Py_TYPE(object))) {
    weak_ = PyWeakref_NewRef(object, nullptr);
    PyErr_Clear();
  }
  // What takes part in garbage collection could hold, in a cycle, whoever holds this State.
  owned_ = weak_ == nullptr && (IsPlain(object) || !PyObject_IS_GC(object));
  if (owned_) Py_INCREF(object_);
}

Same::~Same() {
  Py_XDECREF(weak_);
  if (owned_) Py_DECREF(object_);
}

Same::Same(Same&& other) noexcept
    : object_(std::exchange(other.object_, nullptr)),
      weak_(std::exchange(other.weak_, nullptr)),
      owned_(std::exchange(other.owned_, false)) {}

PyObject* Same::get() const {
  if (weak_ == nullptr) return object_;
  PyObject* object = PyWeakref_GET_OBJECT(weak_);
  return object == Py_None ? nullptr : object;
}

bool Same::Is(PyObject* now) const {
  if (now == object_) return weak_ == nullptr || PyWeakref_GET_OBJECT(weak_) == now;
  return owned_ && Py_TYPE(now) == Py_TYPE(object_) && IsPlain(now) && SamePython(object_, now);
}

State::~State() {
  for (Entry& entry : entries_) {
    Py_XDECREF(entry.weak);
    Py_XDECREF(entry.copy);
    for (Item& item : entry.items) Py_XDECREF(item.key);
  }
  for (PyObject* object : kept_) Py_DECREF(object);
  Py_XDECREF(differing_key_);
}

void State::Keep(PyObject* object) {
  Py_INCREF(object);
  kept_.push_back(object);
}

int State::Add(Entry entry) {
  entries_.push_back(std::move(entry));
  words_.clear();  // are noted again
  word_of_.clear();
  return entries_.size() - 1;
}

void State::Snapshot(Entry* entry, PyObject* dict) {
  entry->version = DictVersion(dict);
  PyObject *key, *value;
  Py_ssize_t position = 0;
  entry->items.reserve(PyDict_GET_SIZE(dict));
  while (PyDict_Next(dict, &position, &key, &value)) {
    Py_INCREF(key);
    entry->items.push_back({key, Same(value)});
  }
}

int State::AddObject(PyObject* object, bool transient, bool held) {
  Entry entry{Kind::kObject, object};
  entry.transient = transient;
  if (!transient && !held && PyType_SUPPORTS_WEAKREFS(Py_TYPE(object))) {
    entry.weak = PyWeakref_NewRef(object, nullptr);
    PyErr_Clear();
  }
  entry.type = Py_TYPE(object);
  entry.dict = Attributes(object);
  if (entry.dict != nullptr) Snapshot(&entry, entry.dict);
  return Add(std::move(entry));
}

int State::AddLocal(PyObject* local) {
  PyObject* dict = PyObject_GetAttrString(local, "__dict__");
  if (dict == nullptr) return -1;
  Entry entry{Kind::kLocal, local};
  Snapshot(&entry, dict);
  Py_DECREF(dict);
  return Add(std::move(entry));
}

int State::AddDict(PyObject* dict) {
  Entry entry{Kind::kDict, dict};
  Snapshot(&entry, dict);
  return Add(std::move(entry));
}

int State::AddSequence(PyObject* sequence) {
  Entry entry{Kind::kSequence, sequence};
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence); ++i) {
    entry.values.emplace_back(PySequence_Fast_GET_ITEM(sequence, i));
  }
  return Add(std::move(entry));
}

int State::AddSet(PyObject* set) {
  Entry entry{Kind::kSet, set};
  PyObject* iterator = PyObject_GetIter(set);
  if (iterator == nullptr) return -1;
  while (PyObject* item = PyIter_Next(iterator)) {
    entry.values.emplace_back(item);
    Py_DECREF(item);
  }
  Py_DECREF(iterator);
  if (PyErr_Occurred()) return -1;
  return Add(std::move(entry));
}

int State::AddClass(PyObject* object) {
  Entry entry{Kind::kClass, object};
  entry.type = reinterpret_cast<PyTypeObject*>(object);
  PyObject_HasAttrString(object, "__name__");  // a lookup is what gives a class its version
  PyErr_Clear();
  PyObject* name = PyUnicode_InternFromString("__call__");
  _PyType_Lookup(entry.type, name);
  Py_XDECREF(name);
  entry.version = ClassVersion(entry.type);
  if (entry.version == 0) {
    PyErr_SetString(PyExc_RuntimeError, "a class without a version");
    return -1;
  }
  return Add(std::move(entry));
}

int State::AddArray(PyObject* array) {
  Entry entry{Kind::kArray, array};
  entry.copy = ArrayBytes(array);
  if (entry.copy == nullptr) return -1;
  return Add(std::move(entry));
}

void State::Ignore(int number, PyObject* key) {
  for (Item& item : entries_[number].items) {
    if (PyObject_RichCompareBool(item.key, key, Py_EQ) == 1) item.ignored = true;
  }
}

void State::SetTransient(int parent, PyObject* key, int child) {
  for (Item& item : entries_[parent].items) {
    if (PyObject_RichCompareBool(item.key, key, Py_EQ) == 1) item.transient = child;
  }
}

void State::SetTransientItem(int parent, int position, int child) {
  entries_[parent].transients.emplace_back(position, child);
}

bool State::Differs(PyObject* key) {
  Py_XINCREF(key);
  Py_XDECREF(differing_key_);
  differing_key_ = key;
  return false;
}

bool State::DictHolds(Entry* entry, PyObject* dict) {
  if (dict == nullptr) return Differs(nullptr);
  const uint64_t version = DictVersion(dict);
  if (version == entry->version) return true;
  if (PyDict_GET_SIZE(dict) != static_cast<Py_ssize_t>(entry->items.size())) return Differs(nullptr);
  for (Item& item : entry->items) {
    PyObject* now = PyDict_GetItemWithError(dict, item.key);
    if (now == nullptr) {
      PyErr_Clear();
      return Differs(item.key);
    }
    if (item.transient >= 0) {
      Entry& child = entries_[item.transient];
      const bool fits = child.kind == Kind::kDict  ? PyDict_Check(now)
                        : child.kind == Kind::kSet ? PyAnySet_Check(now)
                        : child.kind == Kind::kSequence
                            ? PyList_Check(now) || PyTuple_Check(now)
                            : child.kind == Kind::kObject;
      if (!fits) return Differs(item.key);
      Repoint(&child, now);
    } else if (!item.ignored && !item.value.Is(now)) {
      return Differs(item.key);
    }
  }
  entry->version = version;
  return true;
}

bool State::EntryHolds(Entry* entry) {
  switch (entry->kind) {
    case Kind::kObject: {
      if (entry->weak != nullptr && PyWeakref_GET_OBJECT(entry->weak) != entry->object) return Differs(nullptr);
      if (Py_TYPE(entry->object) != entry->type) return Differs(nullptr);
      PyObject* dict = Attributes(entry->object);
      if (!entry->transient && dict != entry->dict) return Differs(nullptr);
      return dict == nullptr || DictHolds(entry, dict);
    }
    case Kind::kLocal: {
      PyObject* dict = PyObject_GetAttrString(entry->object, "__dict__");
      if (dict == nullptr) {
        PyErr_Clear();
        return Differs(nullptr);
      }
      const bool holds = DictHolds(entry, dict);
      Py_DECREF(dict);  // the thread keeps it
      return holds;
    }
    case Kind::kDict:
      return DictHolds(entry, entry->object);
    case Kind::kSequence: {
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(entry->object);
      if (size != static_cast<Py_ssize_t>(entry->values.size())) return Differs(nullptr);
      if (size == 0) return true;
      auto transient = entry->transients.begin();
      for (Py_ssize_t i = 0; i < size; ++i) {
        PyObject* now = PySequence_Fast_GET_ITEM(entry->object, i);
        if (transient != entry->transients.end() && transient->first == i) {
          Repoint(&entries_[transient->second], now);
          ++transient;
        } else if (!entry->values[i].Is(now)) {
          return Differs(nullptr);
        }
      }
      return true;
    }
    case Kind::kSet: {
      if (PySet_GET_SIZE(entry->object) != static_cast<Py_ssize_t>(entry->values.size())) {
        return Differs(nullptr);
      }
      for (const Same& value : entry->values) {
        PyObject* item = value.get();
        if (item != nullptr && PySet_Contains(entry->object, item) == 1) continue;
        PyErr_Clear();
        return Differs(nullptr);
      }
      return true;
    }
    case Kind::kClass:
      return ClassVersion(entry->type) == entry->version || Differs(nullptr);
    case Kind::kArray: {
      PyObject* bytes = ArrayBytes(entry->object);
      if (bytes == nullptr) {
        PyErr_Clear();
        return Differs(nullptr);
      }
      const bool same = PyBytes_GET_SIZE(bytes) == PyBytes_GET_SIZE(entry->copy) &&
                        std::memcmp(PyBytes_AS_STRING(bytes), PyBytes_AS_STRING(entry->copy),
                                    PyBytes_GET_SIZE(bytes)) == 0;
      Py_DECREF(bytes);
      return same || Differs(nullptr);
    }
  }
  return false;
}

const State::Word State::kNever = {&kZero, 1};  // tells nothing: the entry is always asked
const State::Word State::kAlways = {&kZero, 0};

State::Word State::Now(const uint64_t* at) { return {at, *at}; }

void State::NoteItem(const Same& value, PyObject* const* at, std::vector<Word>* words) const {
  words->push_back(Now(Address(at)));
  // Another object may have come to be where one was. A version is never given twice, and plain
  // values are kept; of anything else, a weak reference knows.
  if (value.weak() != nullptr && versioned_.count(*at) == 0) {
    words->push_back(Now(AddressOfObject(value.weak())));
  }
}

void State::NoteWords(const Entry& entry, std::vector<Word>* words) const {
  PyObject* x = entry.object;
  switch (entry.kind) {
    case Kind::kObject: {
      if (entry.weak != nullptr) words->push_back(Now(AddressOfObject(entry.weak)));
      words->push_back(Now(Address(&x->ob_type)));
      PyObject** dict = _PyObject_GetDictPtr(x);
      if (dict == nullptr) return;
      words->push_back(Now(Address(dict)));
      if (*dict != nullptr) words->push_back({AddressOfVersion(*dict), entry.version});
      return;
    }
    case Kind::kDict:
      return words->push_back({AddressOfVersion(x), entry.version});
    case Kind::kSequence: {
      words->push_back(Now(Address(&reinterpret_cast<PyVarObject*>(x)->ob_size)));
      if (entry.values.empty()) return;
      if (PyList_Check(x)) {
        words->push_back(Now(Address(&reinterpret_cast<PyListObject*>(x)->ob_item)));
      }
      for (size_t i = 0; i < entry.values.size(); ++i) {
        NoteItem(entry.values[i], PySequence_Fast_ITEMS(x) + i, words);
      }
      return;
    }
    case Kind::kSet: {
      const auto* set = reinterpret_cast<PySetObject*>(x);
      words->push_back(Now(Address(&set->used)));
      if (entry.values.empty()) return;
      words->push_back(Now(Address(&set->mask)));
      words->push_back(Now(Address(&set->table)));
      for (const Same& value : entry.values) {
        const setentry* at = set->table;
        while (at <= set->table + set->mask && !(at->key != nullptr && value.Is(at->key))) ++at;
        if (at > set->table + set->mask) return words->push_back(kNever);
        NoteItem(value, &at->key, words);
      }
      return;
    }
    case Kind::kLocal:
    case Kind::kClass:
    case Kind::kArray:
      return words->push_back(kNever);
  }
}

// Asks every entry, parents first, before its words are noted: what is gone is not touched.
bool State::HoldsAtFirst() {
  for (const Entry& entry : entries_) {
    if (entry.kind == Kind::kObject && entry.dict != nullptr && !entry.transient) {
      versioned_.insert(entry.object);
    }
  }
  std::vector<Word> words;
  for (size_t i = 0; i < entries_.size(); ++i) {
    if (!EntryHolds(&entries_[i])) {
      differs_ = i;
      return false;
    }
    entries_[i].first_word = words.size();
    NoteWords(entries_[i], &words);
    word_of_.resize(words.size(), i);
  }
  words_ = std::move(words);
  differs_ = -1;
  return true;
}

// A child that may be made anew is where its parent says now: its words are of another object.
void State::Repoint(Entry* child, PyObject* object) {
  if (child->object == object) return;
  child->object = object;
  if (!words_.empty()) words_[child->first_word] = kNever;
}

bool State::Holds() {
  if (words_.empty()) return HoldsAtFirst();
  const size_t size = words_.size();
  for (size_t i = 0; i < size; ++i) {
    if (*words_[i].at == words_[i].is) continue;
    const int number = word_of_[i];
    if (!EntryHolds(&entries_[number])) {
      differs_ = number;
      return false;
    }
    i = NoteWordsAgain(number) - 1;
  }
  differs_ = -1;
  return true;
}

// Returns the first word of the next entry.
size_t State::NoteWordsAgain(int number) {
  std::vector<Word> words;
  NoteWords(entries_[number], &words);
  const size_t first = entries_[number].first_word;
  size_t end = first;
  for (; end < words_.size() && word_of_[end] == number; ++end) {
    words_[end] = end - first < words.size() ? words[end - first] : kAlways;
  }
  if (words.size() > end - first) words_[first] = kNever;  // more than there is room for
  return end;
}

}  // namespace terra
