"""``lm.jit``: from Python functions on models to compiled programs on flat lists of arrays.

How a call becomes a program, file by file: ``arguments`` and ``captures`` find the arrays and models, ``given`` the
containers among the arguments; ``guards`` tells whether a model is as it was; ``binding`` lists the leaves; ``trace``
runs the function on the models while they hold tracers, ``records`` notes what it did to them; ``program`` compiles and
``launch`` starts what is compiled; ``before`` undoes a call in plain Python that fails; ``cache`` keeps; ``function``
ties it together.
"""
