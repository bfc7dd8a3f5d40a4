/* Where tensors are in memory, by torch's own function of a tensor's Python object. Called with the interpreter
   locked; what is declared here is of Python's stable interface. */
typedef void *object;
extern object PyTuple_GetItem(object, long);
extern int PyDict_Next(object, long *, object *, object *);
extern object PyObject_Type(object);
extern void Py_DecRef(object);

/* Of n tensors of a tuple. */
void of_tensors(object tensors, long n, void **found, void *(*address_of)(object)) {
    for (long i = 0; i < n; i++) found[i] = address_of(PyTuple_GetItem(tensors, i));
}

/* Of all tensors in n dicts of a tuple, one after the other; 0 if they are not the known objects, of this type, as
   many in each dict as `ends` says. */
int of_states(object states, long n, const long *ends, const object *known, object type, void **found,
              void *(*address_of)(object)) {
    long i = 0;
    for (long d = 0; d < n; d++) {
        object key, value, state = PyTuple_GetItem(states, d);
        long at = 0;
        while (PyDict_Next(state, &at, &key, &value)) {
            if (i == ends[d] || value != known[i]) return 0;
            object of = PyObject_Type(value);
            Py_DecRef(of);
            if (of != type) return 0;
            found[i++] = address_of(value);
        }
        if (i != ends[d]) return 0;
    }
    return 1;
}
