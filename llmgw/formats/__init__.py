"""How dates are written, whatever the browser says: sortable, and to the second."""
