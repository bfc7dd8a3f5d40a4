/* Where tensors are in memory and what they are, by torch's C interface for compiled models (aoti_torch/c/shim.h),
   whose functions give 0 unless they failed. Called with the interpreter locked; what is declared here of Python is of
   its stable interface. A tensor's handle is inside its Python object, `offset` bytes from the beginning. */
typedef void *object;
extern object PyTuple_GetItem(object, long);
extern int PyDict_Next(object, long *, object *, object *);
extern object PyObject_Type(object);
extern void Py_DecRef(object);

struct torch {
    int (*address)(void *, void **);
    int (*elements)(void *, long long *);
    int (*dtype)(void *, int *);
    int (*contiguous)(void *, _Bool *);
    long offset;
};

/* Of n tensors of a tuple: addresses; elements and dtypes, with the lowest bit for contiguous ones. 0 if one has none. */
int of_tensors(object tensors, long n, const struct torch *torch, void **found, long long *kinds) {
    for (long i = 0; i < n; i++) {
        void *handle = (char *)PyTuple_GetItem(tensors, i) + torch->offset;
        int dtype;
        _Bool contiguous;
        if (torch->address(handle, found + i) || torch->elements(handle, kinds + 2 * i)) return 0;
        if (torch->dtype(handle, &dtype) || torch->contiguous(handle, &contiguous)) return 0;
        kinds[2 * i + 1] = 2 * dtype + contiguous;
    }
    return 1;
}

/* Addresses of all tensors in n dicts of a tuple, one after the other; 0 if they are not the known objects, of this
   type, as many in each dict as `ends` says. */
int of_states(object states, long n, const struct torch *torch, const long *ends, const object *known, object type,
              void **found) {
    long i = 0;
    for (long d = 0; d < n; d++) {
        object key, value, state = PyTuple_GetItem(states, d);
        long at = 0;
        while (PyDict_Next(state, &at, &key, &value)) {
            if (i == ends[d] || value != known[i]) return 0;
            object of = PyObject_Type(value);
            Py_DecRef(of);
            if (of != type || torch->address((char *)value + torch->offset, found + i++)) return 0;
        }
        if (i != ends[d]) return 0;
    }
    return 1;
}
