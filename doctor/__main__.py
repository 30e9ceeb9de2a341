from doctor.diagnose import main
from runtime import guard

guard.run(main)
