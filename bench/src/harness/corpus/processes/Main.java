import java.util.*;

public class Main {
    record Order(long id, String name, double price, List<String> tags, long[] times) {}

    public static void main(String[] arguments) throws Exception {
        Random random = new Random(4);
        String[] words = new String[5000];
        for (int i = 0; i < words.length; i++) {
            StringBuilder word = new StringBuilder();
            for (int letters = 2 + random.nextInt(8); letters > 0; letters--) {
                word.append("etaoinshrdlu".charAt(random.nextInt(12)));
            }
            words[i] = word.toString();
        }
        Map<String, Order> byName = new HashMap<>();
        TreeMap<Long, Order> byId = new TreeMap<>();
        for (long id = 0; id < 120000; id++) {
            String name = words[random.nextInt(5000)] + " " + words[random.nextInt(5000)] + " " + id;
            List<String> tags = new ArrayList<>();
            for (int tag = random.nextInt(4); tag >= 0; tag--) tags.add(words[random.nextInt(5000)]);
            long[] times = {1700000000000L + random.nextInt(), 1700000000000L + random.nextInt(), id};
            Order order = new Order(id, name, random.nextDouble() * 500, tags, times);
            byName.put(name, order);
            byId.put(random.nextLong(), order);
        }
        System.out.println("ready");
        Thread.sleep(3600000);
        System.out.println(byName.size() + byId.size());
    }
}
