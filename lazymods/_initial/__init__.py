"""The values that Flax's initializers give, from a few compiled programs of fixed size that serve every shape.

Element ``i`` of a threefry draw depends on the key and on ``i`` alone. So an initializer that draws once and goes on
element by element can be computed block by block, whatever the shape: ``program`` finds out which ones do, ``kernels``
compiles them, ``fill`` plans and assembles arrays. Each program that executing the initializer would run is compiled
by itself here as well, and only those are taken that come out the same in blocks, so the bits on the CPU are Flax's.
What is not known to be equal is left to the initializer itself.
"""
