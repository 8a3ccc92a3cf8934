"""``lm.jit``: from Python functions on models to compiled programs on flat lists of arrays.

How a call becomes a program, file by file: ``arguments`` and ``captures`` find the arrays and models, ``given`` the
containers among the arguments; ``guards`` tells whether a model is as it was; ``binding`` lists the leaves; ``sizing``
initializes what is lazy; ``trace`` runs the function on copies; ``records`` notes what it did, and ``replay`` does it
again; ``program`` compiles, ``paths`` and ``branching`` where Python decides; ``placement`` says where on a mesh its
outputs go; ``call_plan`` says how a call runs a program, and ``launch`` starts what is compiled; ``before`` undoes a
call in plain Python that fails; ``function`` ties it together, and ``decorator`` is ``lm.jit`` itself. What a function
can reach is walked and copied by ``lazymods._objects``; ``lazymods._program_cache`` keeps programs.

Beside the way of a call: ``checking`` and ``shadow`` compare it with plain Python; ``stages``, ``lowering``, ``dot``
and ``export`` show and store programs, and ``persistent`` keeps them on disk; ``explain`` tells what was traced;
``statics``, ``constants`` and ``outside`` refuse what no program can do; ``clones`` are those of
``nnx.cached_partial``; ``plain`` stands in where jax or flax lacks a private name.
"""
