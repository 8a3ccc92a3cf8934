"""``lm.jit``: from Python functions on models to compiled programs on flat lists of arrays.

How a call becomes a program, file by file: ``arguments`` and ``captures`` find the arrays and models, ``given`` the
containers among the arguments; ``guards`` tells whether a model is as it was; ``binding`` lists the leaves; ``sizing``
initializes what is lazy; ``reached`` tells what callables hold, ``picture`` numbers all that can change, ``copies``
copies it, and ``trace`` runs the function on the copies; ``records`` notes what it did, and ``replay`` does it again;
``program`` compiles, ``paths`` and ``branching`` where Python decides;
``launch`` starts what is compiled; ``before`` undoes a call in plain Python that fails; ``cache`` keeps; ``function``
ties it together, and ``decorator`` is ``lm.jit`` itself.

Beside the way of a call: ``checking`` and ``shadow`` compare it with plain Python; ``stages``, ``lowering`` and
``export`` show and store programs; ``explain`` and ``metrics`` tell what was traced; ``refusals``, ``statics`` and
``constants`` refuse what no program can do; ``plain`` stands in where jax or flax lacks a private name.
"""
