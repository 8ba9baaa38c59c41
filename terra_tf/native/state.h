// The State: what a library call depends on besides its arguments, as it was when it was recorded.
//
// A list of entries: objects with their attributes, dictionaries, lists, sets, classes. That an entry
// has not changed since it was looked at last is told by a few words of memory: a dictionary by
// CPython's version tag alone (PEP 509), a list by its size and items. Those of all entries lie in
// one array, which is compared in a nanosecond a word; where a word differs, the entry's contents
// are compared, by identity and, for plain Python values, by value. A parent comes before its
// children, so no pointer is followed that a parent that still holds does not keep alive. A State
// itself keeps little more than plain values.
#pragma once
#include <Python.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

namespace terra {

// The version of a dictionary; another one after each change, and none is given twice (PEP 509).
uint64_t DictVersion(PyObject* dict);

// A Python object that is compared by identity without keeping it alive. Of objects without weak
// references, containers have an entry of their own in a State, which compares their contents, and
// such as take no part in garbage collection are kept alive.
class Same {
 public:
  explicit Same(PyObject* object);
  ~Same();
  Same(Same&& other) noexcept;
  Same(const Same&) = delete;
  // Whether `now` is this very object, or an equal plain value.
  bool Is(PyObject* now) const;
  PyObject* get() const;  // borrowed; null if it is gone
  PyObject* weak() const { return weak_; }  // borrowed; null where there is none

 private:
  PyObject* object_;
  PyObject* weak_ = nullptr;  // a weak reference (owned)
  bool owned_ = false;        // `object_` is
};

class State {
 public:
  ~State();
  // Each returns the number of the entry. Null or false: a Python exception is set.
  // An object with its attributes. `held`: an entry before it has to be as it was for it to be alive.
  int AddObject(PyObject* object, bool transient, bool held);
  int AddLocal(PyObject* local);                    // a threading.local: this thread's attributes
  int AddDict(PyObject* dict);
  int AddSequence(PyObject* sequence);  // a list or tuple
  int AddSet(PyObject* set);
  int AddClass(PyObject* type);
  int AddArray(PyObject* array);
  // Keeps an object alive that no entry before its own does.
  void Keep(PyObject* object);
  // Leaves an attribute, or a key, of an entry out of the comparison.
  void Ignore(int entry, PyObject* key);
  // The value of `key` in entry `parent` is the object of entry `child`, and may be made anew: then
  // its contents are compared.
  void SetTransient(int parent, PyObject* key, int child);
  // The same for the item at `position` of the sequence `parent`.
  void SetTransientItem(int parent, int position, int child);

  // Whether everything is as it was.
  bool Holds();
  // The entry that differs, after `Holds` was false, and the key in it (new reference, may be null).
  int differs() const { return differs_; }
  PyObject* differing_key() const { return differing_key_; }
  size_t size() const { return entries_.size(); }

 private:
  enum class Kind { kObject, kLocal, kDict, kSequence, kSet, kClass, kArray };
  struct Item {
    PyObject* key;  // owned
    Same value;
    int transient = -1;  // its entry
    bool ignored = false;
  };
  struct Entry {
    Kind kind;
    PyObject* object;         // borrowed; kept alive by its parent, or by `Keep`
    PyObject* weak = nullptr;  // for an object that no parent keeps alive (owned)
    PyTypeObject* type = nullptr;  // borrowed; an object of it comes before
    PyObject* dict = nullptr;      // borrowed: the attributes
    uint64_t version = 0;
    bool transient = false;
    size_t first_word = 0;
    std::vector<Item> items;       // of a dictionary
    std::vector<Same> values;      // of a sequence
    std::vector<std::pair<int, int>> transients;  // position in it -> its entry
    PyObject* copy = nullptr;      // the bytes of an array (owned)
  };
  // Memory, and what it was when the entry was looked at last.
  struct Word {
    const uint64_t* at;
    uint64_t is;
  };
  static const Word kNever, kAlways;
  static Word Now(const uint64_t* at);
  int Add(Entry entry);
  void Snapshot(Entry* entry, PyObject* dict);
  bool HoldsAtFirst();
  size_t NoteWordsAgain(int number);
  void NoteWords(const Entry& entry, std::vector<Word>* words) const;
  void NoteItem(const Same& value, PyObject* const* at, std::vector<Word>* words) const;
  void Repoint(Entry* child, PyObject* object);
  bool EntryHolds(Entry* entry);
  bool DictHolds(Entry* entry, PyObject* dict);
  bool Differs(PyObject* key);

  std::vector<Entry> entries_;
  std::vector<Word> words_;   // of all entries, in their order; none before it first holds
  std::vector<int> word_of_;  // word -> its entry
  std::unordered_set<PyObject*> versioned_;  // objects that an entry tells by a version
  std::vector<PyObject*> kept_;  // owned
  int differs_ = -1;
  PyObject* differing_key_ = nullptr;
};

}  // namespace terra
