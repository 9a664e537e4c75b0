"""The verbs: each reads its options, calls one function of the package, and prints what came of it."""
