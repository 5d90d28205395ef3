"""How long a step is: the files of the package that it enters, and how often it switches between them."""
