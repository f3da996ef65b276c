"""One file an API: the fields of its body, and how its engine makes a prompt of them."""
